"""`redrafter compare`: its figures contain no compilation, and its output and JSON say what was measured."""

import io
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rich.console import Console

from redrafter.cli import compare
from redrafter.cli.main import main
from redrafter.engine.request import Part, Stats


class FakeEngine:
    """Compiles for 60 s whenever a prompt length, a kind of sampling or a length of text is new, on both sides."""

    STEP_SECONDS, COMPILE_SECONDS = 1.0, 60.0

    def __init__(self, clock: "FakeClock", drafts: int, runtime: str = "compiled") -> None:
        self.clock, self.drafts, self.runtime = clock, drafts, runtime
        self.compiled: set[tuple] = set()
        self.target = SimpleNamespace(
            device=SimpleNamespace(type="cuda" if runtime != "eager" else "cpu"),
            tokenizer=SimpleNamespace(decode=lambda ids, **_: "x" * len(ids), chat_template=None),
        )
        self.rule_config = SimpleNamespace(lossless=True, name="seeded")
        self._plain = self if drafts == 0 else FakeEngine(clock, 0, runtime)

    def plain(self) -> "FakeEngine":
        return self._plain

    def requests(self, prompts, **options) -> list[SimpleNamespace]:
        return [SimpleNamespace(prompt=prompt, options=options) for prompt in prompts]

    def run(self, requests) -> Iterator[list[Part]]:
        [request] = requests
        tokens, stats = 0, Stats(rule="seeded", lossless=True)
        while tokens < request.options["max_new_tokens"]:
            # What is compiled depends on the prompt, the sampling, the cache, and how far the text has come.
            sampled, budget = request.options["temperature"] > 0, request.options["max_new_tokens"]
            key = (len(request.prompt), sampled, budget, tokens // 8)
            self.clock.now += self.STEP_SECONDS if key in self.compiled else self.COMPILE_SECONDS
            self.compiled.add(key)
            gained = min(1 + self.drafts, budget - tokens)
            tokens += gained
            stats = Stats("seeded", True, stats.steps + 1, tokens)
            yield [Part(0, "x" * gained, [7] * gained, gained - 1, stats, None)]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def compared(monkeypatch, tmp_path, *options: str, runtime: str = "compiled") -> dict:
    """The JSON of a comparison whose true speedup is 2: two tokens a step, and a step costs the same on both sides."""
    clock = FakeClock()
    engine = FakeEngine(clock, drafts=1, runtime=runtime)
    monkeypatch.setattr(compare, "load_engine", lambda args: engine)
    monkeypatch.setattr(compare, "clock", clock)
    monkeypatch.setattr(compare, "synchronizer", lambda device: lambda: None)
    file = tmp_path / "out.json"
    assert main(["compare", "--save", str(file), "--overwrite", *options, "short", "a longer prompt"]) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize("options", [(), ("--temperature", "1", "--seed", "3"), ("--max-new-tokens", "32")])
def test_no_figure_contains_compilation(monkeypatch, tmp_path, capsys, options):
    result = compared(monkeypatch, tmp_path, *options)
    assert result["headline"]["speedup"] == pytest.approx(2.0)
    for row in result["rows"]:
        assert row["plain_seconds"] == row["tokens"], "a second for each step, none for compilation"
        assert row["speculative_seconds"] == row["tokens"] / 2
    assert "speedup 2.00×" in capsys.readouterr().out


def no_warm_up(engine, request) -> None:
    """Everything compiles under the clock."""


def speculative_only(engine, request) -> None:
    """As the defect was: only the speculative side, with another prompt and another length."""
    list(engine.run([SimpleNamespace(prompt="[1, 2, 3]", options={"max_new_tokens": 4, "temperature": 0.0})]))


def too_short(engine, request) -> None:
    """Both sides, but only their first step."""
    for side in (engine.plain(), engine):
        next(side.run([request]))


@pytest.mark.parametrize("warm_up", [no_warm_up, speculative_only, too_short])
def test_no_figure_contains_compilation_twin(monkeypatch, tmp_path, warm_up):
    monkeypatch.setattr(compare, "warm_up", warm_up)
    result = compared(monkeypatch, tmp_path)
    assert any(row["plain_seconds"] >= row["tokens"] + 59 for row in result["rows"])


def test_a_step_launched_ahead_is_paid_by_its_own_run(monkeypatch):
    """The device finishes the launched step in `synchronize`, before the clock of this run stops."""
    clock = FakeClock()
    monkeypatch.setattr(compare, "clock", clock)

    def finish() -> None:
        clock.now += 5.0

    run = compare.TimedRun("plain", iter([[], []]), None, finish)
    run.advance()
    assert run.seconds == 5.0


def test_no_thread_draws_during_a_step(monkeypatch):
    """On a terminal the panels are drawn between steps, at the end too, and drawing takes no run's time."""
    clock, out = FakeClock(), io.StringIO()
    monkeypatch.setattr(compare, "clock", clock)
    monkeypatch.setattr("redrafter.engine.ties.explain", lambda *_: None)
    before = threading.active_count()

    class Watching(FakeEngine):
        def run(self, requests) -> Iterator[list[Part]]:
            for parts in super().run(requests):
                assert threading.active_count() == before
                yield parts

    engine = Watching(clock, drafts=1, runtime="eager")
    engine._plain = Watching(clock, drafts=0, runtime="eager")
    for side in (engine, engine.plain()):
        side.COMPILE_SECONDS = side.STEP_SECONDS
    request = SimpleNamespace(prompt="x", options={"max_new_tokens": 8, "temperature": 0.0})
    made = compare.compare(engine, request, "x", Console(file=out, force_terminal=True, width=100))
    assert (made.plain.seconds, made.speculative.seconds) == (8.0, 4.0)
    assert "speculative: 4.0 s" in out.getvalue()


def test_where_nothing_is_compiled_the_warm_up_is_short(monkeypatch):
    engine = FakeEngine(FakeClock(), drafts=1, runtime="eager")
    steps = []
    for side in (engine, engine.plain()):
        side.run = lambda requests, side=side: (steps.append(side) for _ in range(50))
    compare.warm_up(engine, SimpleNamespace(prompt="x", options={}))
    assert steps == [engine.plain()] * 3 + [engine] * 3


def test_it_saves_what_it_measured_and_overwrites_nothing(capsys, tmp_path):
    file = tmp_path / "out.json"
    prompt = "why does a[/i] fail, and x[i] not? one two three one two three"
    assert main(["compare", "--max-new-tokens", "12", "--save", str(file), prompt]) == 0
    out = capsys.readouterr().out
    assert "why does a[/i] fail, and x[i] not?" in out, "brackets are printed as they are"
    assert "1 of 1 texts equal" in " ".join(out.split())
    result = json.loads(file.read_text())
    assert set(result) == {"command", "commit", "versions", "hardware", "date", "headline", "rows"}
    assert set(result["headline"]) == {"tokens_per_step", "speedup", "equal", "ties"}
    assert result["headline"]["equal"] == 1.0
    [row] = result["rows"]
    assert row["tokens_per_step"] == pytest.approx((row["tokens"] - 1) / row["steps"])
    assert result["headline"]["speedup"] == pytest.approx(row["plain_seconds"] / row["speculative_seconds"])
    before = file.read_text()
    for options, message in (
        (["--save", str(file)], "exists; choose another name"),
        (["--save", str(tmp_path / "no" / "out.json")], "does not exist"),
    ):
        assert main(["compare", *options, prompt]) == 2
        assert message in capsys.readouterr().err
    assert file.read_text() == before
