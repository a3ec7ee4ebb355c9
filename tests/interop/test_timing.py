"""Timing: the parts of a step add up, and nothing is measured unless asked for."""

import torch

from redrafter.interop.vllm.timing import Timing


def run(timing: Timing, now: list[float], steps: int) -> None:
    def follow(value):
        now[0] += 0.002
        return value

    watched = timing.watched(follow)
    for _ in range(steps):
        now[0] += 0.005
        with timing.step(8):
            now[0] += 0.001
            assert watched(3) == 3
            now[0] += 0.004


def test_parts_of_a_step(caplog):
    now = [0.0]
    run(Timing(3, torch.device("cpu"), clock=lambda: now[0]), now, 4)
    assert "ms of a step with 8 requests: engine 5.000, before 1.000, launch 2.000, wait 4.000" in caplog.text


def test_nothing_is_measured_unless_asked_for(caplog):
    now = [0.0]
    timing = Timing(0, torch.device("cpu"), clock=lambda: now[0])
    run(timing, now, 4)
    assert not timing.rows
    assert not caplog.text
