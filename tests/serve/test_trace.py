"""What `trace: true` tells of each step, for the page."""

import pytest

from redrafter.engine.request import Request
from redrafter.runtime.row import RowOutput
from redrafter.serve import job as module
from redrafter.serve.chat import ChatAnswer
from redrafter.serve.job import Event, Job
from tests.helpers.clock import Clock


def test_each_step_has_its_own_time_and_what_the_planner_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told late, when both steps are over and the statistics speak of the last one."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    events: list[Event] = []
    job = Job(Request(prompt=[1], max_new_tokens=8, seed=0), events.append)
    for seconds, expected in ((2, 0.0), (3, 1.26)):
        clock.now += seconds
        job.take(RowOutput([5, 6], drafted=1, steps=1, tree=([4, 5], [0, 0], [0, 1]), expected=expected))
    first, second = (ChatAnswer([job], "m", str, [None], trace=True)._shown(event) for event in events)
    assert 2 < first["seconds"] < 2.01 < 5 < second["seconds"] < 5.01
    assert "expected" not in first
    assert second["expected"] == 1.26
    assert second["tree"] == {"tokens": ["4", "5"], "parents": [0, 0], "path": [0, 1]}
