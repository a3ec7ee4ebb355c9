"""The load that a server is measured under, and figures that follow from it."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from redrafter.bench.load_test import Client, Load, Timed, figures, offer, percentile, ratio
from redrafter.bench.plot import plot
from redrafter.cli import bench_serve
from redrafter.cli.main import main
from redrafter.errors import ConfigError
from tests.helpers.serving import NAME, make_served, running


def test_arrivals_are_a_poisson_process_and_repeat():
    moments = Load(concurrency=1, rate=5.0, seed=3).arrivals(4000)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(0.04, rel=0.15), "variance is mean squared"
    assert moments == Load(concurrency=1, rate=5.0, seed=3).arrivals(4000)
    assert moments != Load(concurrency=1, rate=5.0, seed=4).arrivals(4000)


def timed(ms: float, tokens: int = 11, sent: float = 0.0) -> Timed:
    return Timed(sent, sent + 0.5, sent + 0.5 + ms * (tokens - 1) / 1000, tokens, (tokens - 1) // 2, "")


def test_figures_by_hand():
    found = figures([[timed(10), timed(30, 21)]])
    assert found.first_ms == pytest.approx(500)
    assert found.token_ms == pytest.approx((10 * 10 + 30 * 20) / 30)
    assert found.token_ms_p99 == pytest.approx(30)
    assert found.tokens_per_second == pytest.approx(32 / 1.1)
    assert found.tokens_per_step == 2.0
    assert found.under_way == pytest.approx((0.6 + 1.1) / 1.1)


def test_a_ratio_has_an_interval_around_it():
    plain, fast = [timed(20 + i % 3) for i in range(30)], [timed(10 + i % 5) for i in range(30)]
    found, low, high = ratio([plain], [fast])
    assert found == pytest.approx(21 / 12)
    assert low < found < high
    assert ratio([plain], [plain]) == (1.0, 1.0, 1.0)


def test_the_interval_is_over_rounds_if_there_are_enough():
    """Within a round all answers are alike, so drawing answers would make the interval too small."""
    speeds = [10.0, 20.0, 12.0, 18.0, 15.0]
    plain, fast = [[timed(20)] * 200 for _ in speeds], [[timed(ms)] * 200 for ms in speeds]
    found, low, high = ratio(plain, fast)
    assert found == pytest.approx(20 / 15)
    assert high - low > 0.3
    _, low, high = ratio([[*itertools.chain(*plain)]], [[*itertools.chain(*fast)]])
    assert high - low < 0.1, "answers, where there is one round"


def test_percentiles():
    values = [float(i) for i in range(1, 101)]
    assert percentile(values, 0.99) == 99
    assert percentile(values, 0.5) == 50


def test_at_most_so_many_are_under_way():
    served = make_served(rows=8)
    with running(served) as url:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "abc"}],
            "max_tokens": 12,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        every = asyncio.run(offer(Client(url), Load(concurrency=3, rate=1e6), [body] * 9))
        for t in every:
            at_once = sum(o.sent < t.ended and t.sent < o.ended for o in every if o is not t)
            assert t.first_ms > 0
            assert t.tokens <= 12
            assert at_once <= 8
        busiest = max(sum(o.sent <= t.sent < o.ended for o in every) for t in every)
        assert busiest == 3
        with pytest.raises(ConfigError, match="status 400"):
            asyncio.run(offer(Client(url), Load(concurrency=1, rate=1.0), [body | {"temperature": 9}]))


def test_the_command_measures_saves_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save, drawing = tmp_path / "load.json", tmp_path / "load.svg"
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"prompt": p}) for p in ("abc", "hello", "fgh")))
    with running(make_served(rows=4)) as url:
        options = ["--concurrency", "2", "1", "--tokens", "9", "--least", "3", "--rounds", "2", "--label", "a toy"]
        asked = ["bench", "serve", "--url", url, *options, "--prompts", str(questions)]
        assert main([*asked, "--save", str(save), "--plot", str(drawing)]) == 0
        assert main([*asked, "--save", str(save)]) == 2, "nothing is overwritten without a word"
    made = json.loads(save.read_text())
    assert [row["concurrency"] for row in made["rows"]] == [1, 2]
    least = {"min_ratio_to_plain", "min_ratio_to_plain_low", "min_ratio_to_plain_high"}
    assert set(made["headline"]) == {*least, "ratio_at_1"}
    for row in made["rows"]:
        assert row["target"] == "a toy"
        assert row["equal_texts"] == row["speculative_answers"] == row["plain_answers"]
        assert row["plain_tokens_per_step"] == 1.0 <= row["speculative_tokens_per_step"]
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert drawing.read_text().startswith("<svg")
    assert "ratio, 95 %" in capsys.readouterr().out


def test_no_server_is_said_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "start one with redrafter serve" in capsys.readouterr().err


def test_the_headline_holds_only_what_was_measured():
    rows = [{"concurrency": c, "ratio": 3.0 - c / 32, "speculative_token_ms_p99": 7.0} for c in (1, 8, 32)]
    for row in rows:
        row |= {"ratio_low": row["ratio"] - 0.5, "ratio_high": row["ratio"] + 0.25}
    assert bench_serve.headline(rows) == {
        "min_ratio_to_plain": 2.0,
        "min_ratio_to_plain_low": 1.5,
        "min_ratio_to_plain_high": 2.25,
        "ratio_at_1": 2.9688,
        "ratio_at_32": 2.0,
        "p99_ms_per_token_at_8": 7.0,
    }


def test_a_plot_has_all_its_points():
    drawn = plot("<title>", "x", "y", {"a": [(1, 2.0), (2, 1.0)], "b": [(1, 3.0)]}, line=1.0)
    assert drawn.count("<circle") == 3
    assert "&lt;title&gt;" in drawn
