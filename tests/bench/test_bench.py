"""The judge: its statistics on logs with known answers, its runs on disk, others' formats, and who may compete."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from redrafter import Engine, Shape
from redrafter.bench import contenders, entries, formats, runs, suites
from redrafter.bench.contenders import Ours, PromptBatch, TimedAnswer
from redrafter.bench.entries import TargetSetup
from redrafter.bench.runs import BenchmarkRun, RunConfig, read_answers
from redrafter.bench.statistics import by_depth, summaries
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.engine.ties import Difference
from redrafter.errors import ConfigError, CorruptCheckpoint
from redrafter.questions import Question
from tests.helpers.letters import make_target


def record(question, contender, tokens=11, seconds=1.1, first=0.1, accepted=(), **changes):
    """An answer of 1 + 10 tokens in a second after the first token."""
    return {
        "suite": "s", "question": question, "category": "c", "turn": 0, "temperature": 0.0, "batch": 1, "rows": 1,
        "contender": contender, "tokens": tokens, "seconds": seconds, "first_seconds": first,
        "accepted": list(accepted) or [0] * (tokens - 1), "equal": True,
    } | changes  # fmt: skip


def only(rows, contender, category="all"):
    (found,) = [r for r in rows if r["contender"] == contender and r["category"] == category]
    return found


# --- statistics on synthetic logs ---


def test_figures_of_known_logs():
    plain = [record(str(i), "plain") for i in range(4)]
    # Twice as fast after the first token; five steps of two tokens, one guess kept in each.
    fast = [record(str(i), "fast", seconds=0.6, accepted=[1] * 5) for i in range(4)]
    fast[0] |= {"equal": False, "tie": True}
    row = only(summaries(plain + fast, "plain"), "fast")
    assert row["tokens_per_step"] == pytest.approx(2.0)
    assert row["speedup"] == pytest.approx(2.0)
    assert row["speedup_with_prompt"] == pytest.approx(1.1 / 0.6)
    assert row["tokens_per_second"] == pytest.approx(11 / 0.6)
    assert row["ms_to_first_token"] == pytest.approx(100)
    assert row["acceptance_by_depth"] == [1.0]
    assert (row["equal"], row["compared"], row["ties"]) == (3, 4, 1)
    assert (row["speedup_low"], row["speedup_high"]) == (pytest.approx(2.0), pytest.approx(2.0))  # no spread at all
    reference = only(summaries(plain + fast, "plain"), "plain")
    assert (reference["speedup"], reference["tokens_per_step"]) == (1.0, 1.0)


def test_speedup_is_of_totals_not_a_mean_of_ratios():
    plain = [record("a", "plain", seconds=1.1), record("b", "plain", tokens=101, seconds=10.1)]
    fast = [record("a", "fast", seconds=0.2), record("b", "fast", tokens=101, seconds=10.1)]  # 10 times and once
    row = only(summaries(plain + fast, "plain"), "fast")
    assert row["speedup"] == pytest.approx(11.0 / 10.1)
    assert row["speedup_low"] == pytest.approx(1.0)
    assert row["speedup_high"] == pytest.approx(10.0)


def test_interval_covers_the_truth_as_often_as_it_says():
    """Answers drawn at random around a known speedup: about 95 of 100 intervals hold it."""
    import torch

    from redrafter.bench.statistics import bootstrap, decoded, decoding

    generator = torch.Generator().manual_seed(3)
    held = 0
    for _ in range(100):
        spread = torch.rand(40, 2, generator=generator).tolist()
        plain = [record(str(i), "plain", seconds=0.1 + 0.5 + a) for i, (a, _) in enumerate(spread)]
        fast = [record(str(i), "fast", seconds=0.1 + (0.5 + b) / 2) for i, (_, b) in enumerate(spread)]
        low, high = bootstrap(fast, plain, decoded, decoding)
        held += low <= 2.0 <= high
    assert 88 <= held <= 99


def test_turns_of_a_question_are_drawn_together():
    """Ten turns of two questions are two samples, not ten: the interval must reach from one to the other."""
    plain = [record(q, "plain", turn=t) for q in "ab" for t in range(5)]
    fast = [record(q, "fast", turn=t, seconds=0.1 + (1 if q == "a" else 0.25)) for q in "ab" for t in range(5)]
    row = only(summaries(plain + fast, "plain"), "fast")
    assert (row["speedup_low"], row["speedup_high"]) == (pytest.approx(1.0), pytest.approx(4.0))


def test_categories_and_settings_are_kept_apart():
    rows = [
        record("1", "plain"), record("1", "fast", seconds=0.6),
        record("2", "plain", category="d"), record("2", "fast", category="d", seconds=0.35),
        record("1", "plain", temperature=1.0), record("1", "fast", temperature=1.0, seconds=1.1),
    ]  # fmt: skip
    found = summaries(rows, "plain", by_category=True)
    cold = [r for r in found if r["temperature"] == 0]
    assert only(cold, "fast", "c")["speedup"] == pytest.approx(2.0)
    assert only(cold, "fast", "d")["speedup"] == pytest.approx(4.0)
    assert only(cold, "fast")["speedup"] == pytest.approx(2 / (0.5 + 0.25))
    assert only([r for r in found if r["temperature"] == 1], "fast")["speedup"] == pytest.approx(1.0)


def test_shares_of_a_batch_add_up():
    """Four rows that took two seconds together, half a second of it for their first tokens."""
    rows = [record(str(i), "plain", seconds=0.5, first=0.5, batch=4, rows=4) for i in range(4)]
    fast = [r | {"contender": "fast", "seconds": 0.3125} for r in rows]
    assert only(summaries(rows + fast, "plain"), "fast")["speedup"] == pytest.approx((2 - 0.5) / (1.25 - 0.5))


def test_tokens_of_a_prompts_pass_that_guesses_are_no_steps():
    rows = [record("1", "plain"), record("1", "x", first_tokens=5, accepted=[1, 1, 1])]
    assert only(summaries(rows, "plain"), "x")["tokens_per_step"] == pytest.approx(2.0)


def test_by_depth_never_rises():
    shares = by_depth([0, 3, 1, 3, 2])
    assert shares == [0.8, 0.6, 0.4]


# --- runs on disk ---

QUESTIONS = [Question((f"why {w}", "and then"), "odd" if i % 2 else "even", str(i)) for i, w in enumerate("abc")]
CONFIG = RunConfig(suite="s", questions="q", model={}, contenders=("plain", "ngram"), temperatures=(0.0, 1.0))
CONFIG = replace(CONFIG, max_new_tokens=6)


@pytest.fixture(scope="module")
def playing():
    target = make_target()
    return [Ours("plain", Engine(target, NoDrafter())), Ours("ngram", Engine(target, NgramDrafter(2, 1)))]


def play(folder: Path, playing, config=CONFIG, stop_after=None):
    run = BenchmarkRun(folder, config)
    for number, _ in enumerate(run.play(playing, QUESTIONS, playing[0].engine), start=1):
        if number == stop_after:
            break
    return run


def seen(records):
    return sorted((r["temperature"], r["question"], r["turn"], r["contender"], r["text"]) for r in records)


def test_a_run_asks_everybody_everything(tmp_path, playing):
    run = play(tmp_path / "run", playing)
    assert len(run.records) == 2 * 3 * 2 * 2
    assert all(r["equal"] for r in run.records)
    assert {r["hash"] for r in run.records} == {run.hash}
    assert seen(read_answers(tmp_path / "run")) == seen(run.records)


def test_an_interrupted_run_goes_on(tmp_path, playing, monkeypatch):
    whole = play(tmp_path / "whole", playing)
    play(tmp_path / "parts", playing, stop_after=5)
    with (tmp_path / "parts" / runs.ANSWERS).open("a") as file:
        file.write('{"torn')
    asked = []
    answer = Ours.answer
    monkeypatch.setattr(Ours, "answer", lambda self, task: asked.append(self.name) or answer(self, task))
    run = play(tmp_path / "parts", playing)
    assert len(asked) == 2 * (2 * 3 * 2 - 5), "what was answered is not asked again"
    assert seen(read_answers(tmp_path / "parts")) == seen(run.records) == seen(whole.records)


def test_who_is_first_changes(tmp_path, playing, monkeypatch):
    asked = []
    answer = Ours.answer
    monkeypatch.setattr(Ours, "answer", lambda self, task: asked.append(self.name) or answer(self, task))
    play(tmp_path / "run", playing)
    assert {tuple(asked[i : i + 2]) for i in range(0, len(asked), 2)} == {("plain", "ngram"), ("ngram", "plain")}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"max_new_tokens": 7}, "max_new_tokens was 6, now it is 7"), ({"seed": 1}, "seed was 0, now it is 1")],
)
def test_other_settings_are_never_mixed(tmp_path, playing, change, message):
    play(tmp_path / "run", playing, stop_after=1)
    with pytest.raises(ConfigError, match=message):
        BenchmarkRun(tmp_path / "run", replace(CONFIG, **change))


def test_other_code_or_hardware_is_never_mixed(tmp_path, playing, monkeypatch):
    play(tmp_path / "run", playing, stop_after=1)
    for name, value in (("commit", "other"), ("code", "other"), ("hardware", {"gpu": "another"})):
        changed = runs.environment() | {name: value}
        monkeypatch.setattr(runs, "environment", lambda changed=changed: changed)
        with pytest.raises(ConfigError, match=f"{name} was"):
            BenchmarkRun(tmp_path / "run", CONFIG)
        monkeypatch.undo()


def test_answers_of_another_run_are_noticed(tmp_path, playing):
    play(tmp_path / "run", playing, stop_after=1)
    path = tmp_path / "run" / runs.ANSWERS
    path.write_text(path.read_text().replace('"hash": "', '"hash": "x', 1))
    with pytest.raises(CorruptCheckpoint, match="belongs to another run"):
        read_answers(tmp_path / "run")


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="neither empty nor a run"):
        BenchmarkRun(tmp_path, CONFIG)


def test_a_text_that_differs_is_told(tmp_path, playing):
    class Wrong(Ours):
        def answer(self, task):
            return [replace(a, tokens=[(a.tokens[0] + 1) % 30, *a.tokens[1:]]) for a in super().answer(task)]

    run = play(tmp_path / "run", [playing[0], Wrong("ngram", playing[1].engine)], stop_after=1)
    wrong = [r for r in run.records if r["contender"] == "ngram"]
    assert [(r["equal"], r["tie"], r["parts_at"]) for r in wrong] == [(False, False, 0)]


@pytest.mark.parametrize("promised", ["bitwise", "ties"])
def test_a_tie_is_no_excuse_where_the_promise_is_bitwise(tmp_path, playing, monkeypatch, promised):
    """Also the twin of a run that ignores the promise."""

    class Wrong(Ours):
        def answer(self, task):
            return [replace(a, tokens=[(a.tokens[0] + 1) % 30, *a.tokens[1:]]) for a in super().answer(task)]

    monkeypatch.setattr(Engine, "exactness", promised)
    monkeypatch.setattr(runs, "explain", lambda *a: Difference(0, 0.0, 1.0) if a[2] != a[3] else None)
    run = play(tmp_path / "run", [playing[0], Wrong("ngram", playing[1].engine)], stop_after=1)
    [wrong] = [r for r in run.records if r["contender"] == "ngram"]
    assert (wrong["equal"], wrong["tie"], wrong["exactness"]) == (False, promised == "ties", promised)


def test_a_batch_leaves_out_who_takes_one_row_only(tmp_path, playing):
    class Single(Ours):
        one_row = True

    three = [*playing, Single("single", playing[1].engine)]
    run = play(tmp_path / "run", three, replace(CONFIG, batch=2, temperatures=(0.0,)))
    assert {r["contender"] for r in run.records} == {"plain", "ngram"}
    assert {r["rows"] for r in run.records} == {1, 2}
    assert seen(run.records) == [s for s in seen(play(tmp_path / "one", playing).records) if s[0] == 0.0]


# --- others' formats ---


def test_spec_bench_and_fastchat(tmp_path):
    turns = [record("81", "fast", turn=t, text=f"answer {t}", hash="h", accepted=[2, 0, 1][: 3 - t]) for t in (0, 1)]
    formats.export(tmp_path, turns, "model", stamp=1.0)
    (line,) = (tmp_path / "spec_bench" / "model-fast-temp-0.jsonl").read_text().splitlines()
    entry = json.loads(line)
    choice = entry["choices"][0]
    assert (entry["question_id"], entry["category"], entry["model_id"]) == (81, "c", "model-fast-temp-0")
    assert choice["turns"] == ["answer 0", "answer 1"]
    assert choice["accept_lengths"] == [3, 1, 2, 3, 1]
    assert (choice["decoding_steps"], choice["new_tokens"], choice["wall_time"]) == ([4, 3], [11, 11], [1.1, 1.1])
    # As its speed.py computes: tokens over seconds, and the mean of accepted lengths.
    assert sum(choice["new_tokens"]) / sum(choice["wall_time"]) == pytest.approx(10.0)
    (line,) = (tmp_path / "fastchat" / "model-fast-temp-0.jsonl").read_text().splitlines()
    assert json.loads(line)["choices"] == [{"index": 0, "turns": ["answer 0", "answer 1"]}]


# --- suites and contenders ---


def test_suites_are_found_or_asked_for(tmp_path, monkeypatch):
    asked = suites.questions("mt_bench", None, None)
    assert (len(asked), {len(q.turns) for q in asked}, len({q.category for q in asked})) == (80, {2}, 8)
    assert len(suites.questions("mt_bench", 8, 1)) == len({q.category for q in suites.questions("mt_bench", 8, 1)}) == 8
    monkeypatch.setattr(suites, "folders", lambda: [tmp_path])
    with pytest.raises(ConfigError, match=r"put its questions as spec_bench.jsonl into"):
        suites.find("spec_bench")
    (tmp_path / "question.jsonl").write_text('{"question_id": 5, "category": "qa", "turns": ["a", "b"]}\n')
    assert suites.questions("spec_bench", None, 1) == [Question(("a",), "qa", "5")]
    with pytest.raises(ConfigError, match="no suite 'spec'"):
        suites.find("spec")


def test_transformers_contenders_write_what_plain_decoding_writes(playing):
    target = playing[0].engine.target
    task = PromptBatch([[3, 1, 4, 1, 5, 1, 4, 1]], [0], 0.0, 8)
    (plain,) = playing[0].answer(task)
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        theirs = contenders.Transformers("x", target.model, playing[0].engine.eos_tokens(), **options)
        (answer,) = theirs.answer(task)
        assert answer.tokens == plain.tokens
        assert answer.first_tokens + sum(n + 1 for n in answer.accepted) == len(answer.tokens)
        assert 0 < answer.first_seconds <= answer.seconds


def test_llama_cpp_is_spoken_to_as_it_wants(playing, monkeypatch):
    """A stand-in for the package: what we ask of it, and that its answer ends where it must."""
    said = []

    class Llama:
        def __init__(self, path, **options):
            said.append((path, options["n_ctx"]))

        def reset(self):
            said.append("reset")

        def set_seed(self, seed):
            said.append(seed)

        def generate(self, prompt, **options):
            said.append((prompt, options["temp"], options["top_k"]))
            yield from [7, 8, 39, 9]

    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=Llama))
    place = TargetSetup(playing[0].engine.target, "", "eager")
    (_, llama) = entries.make(place, ["llama.cpp=x.gguf"], [])
    (answer,) = llama.answer(PromptBatch([[1, 2]], [3], 0.0, 9))
    assert answer == TimedAnswer([7, 8, 39], answer.seconds, answer.first_seconds, [0, 0])
    assert said == [("x.gguf", 4096), "reset", 3, ([1, 2], 0.0, 1)]


@pytest.mark.parametrize(
    ("specs", "message"),
    [(["lookahead"], "no contender 'lookahead'"), (["ngram", "ngram"], "named twice"), (["medusa"], "medusa=FOLDER")],
)
def test_contenders_that_cannot_be(playing, specs, message):
    with pytest.raises(ConfigError, match=message):
        entries.make(TargetSetup(playing[0].engine.target, "", "eager"), specs, [])


def test_a_grid_of_shapes(playing):
    place = TargetSetup(playing[0].engine.target, "", "eager")
    made = entries.make(place, ["ngram"], [Shape(width=1, length=2), Shape(width=2, length=3, nodes=4)])
    assert [c.name for c in made] == ["plain", "ngram 1x2:2", "ngram 2x3:4"]
    assert made[2].engine.shape == Shape(width=2, length=3, nodes=4)
