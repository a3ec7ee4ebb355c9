"""The comparison of verifications: its figures are what they say, and a way that errs is seen to."""

import json
import statistics
from dataclasses import replace

import pytest
import torch

from redrafter import Engine, Gamma, RuleConfig, Shape
from redrafter.bench import quality, sampling, tasks, verification
from redrafter.cli.main import main
from redrafter.drafters import ModelDrafter
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, make_model

PAIRS = [
    ("The cat, it sat on the mat.", "the cat sat at the mat"),
    ("one two three", "completely different words here"),
    ("It's 3 o'clock -- isn't it?", "it's three o'clock isn't it"),
    ("nothing", ""),
    ("a b c d", "a b c d"),
]


def test_rouge_1_is_rouge_score_s():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1"])
    for reference, text in PAIRS:
        assert quality.rouge1(reference, text) == pytest.approx(scorer.score(reference, text)["rouge1"].fmeasure)


def test_word_error_rate_is_jiwer_s():
    jiwer = pytest.importorskip("jiwer")
    references, texts = ([" ".join(quality.normalise(t)) for t in column] for column in zip(*PAIRS, strict=True))
    assert quality.word_error_rate(references, texts) == pytest.approx(jiwer.wer(references, texts))


def test_every_text_is_scored_against_its_own_reference():
    """Whatever their order and how many are written at once; twin: against another's, they err."""
    summaries = object.__new__(tasks.Summaries)  # no model is needed to score
    summaries.articles = [tasks.Article("", words) for words in ("a b", "c d", "e f", "g h")]
    summaries.batch = 2
    assert summaries.score([(1, "e f\0g h"), (0, "a b\0c d")]) == 1.0
    assert summaries.score([(1, "e f\0h x")]) == pytest.approx(0.75)
    assert summaries.score([(0, "e f\0g h")]) == 0.0
    speech = object.__new__(tasks.Speech)
    speech.transcripts = {"one.wav": "a b c", "two.wav": "d"}
    assert speech.score([(1, "D."), (0, "a, b c"), (1, "d")]) == 0.0
    assert speech.score([(0, "a b"), (1, "d")]) == pytest.approx(1 / 4), "over all words, not over texts"
    assert speech.score([(0, "d"), (1, "a b c")]) > 1.0


def many(rows: int, gamma: int = 2, vocab: int = 6) -> verification.Case:
    """One case, repeated with guesses drawn anew for each row."""
    torch.manual_seed(0)
    target = (torch.randn(1, gamma + 1, vocab) * 1.5).expand(rows, -1, -1)
    draft = target[:, :gamma] + torch.randn(1, gamma, vocab)
    tokens = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1).view(rows, gamma)
    full = torch.full((rows,), gamma)
    every, heat = torch.arange(rows), 1.3
    return verification.Case(target, draft, tokens, full, every, every, torch.full((rows,), heat), heat)


def first_tokens(way, case) -> float:
    """p-value of the first new token under the target's distribution."""
    from scipy.stats import chisquare

    rows, vocab = len(case.tokens), case.target.shape[-1]
    drafted = verification.tempered(case)
    tokens = torch.multinomial(drafted.draft.softmax(-1).flatten(0, 1), 1).view(case.tokens.shape)
    case = verification.replace(case, tokens=tokens)
    new, _ = way(case)
    seen = torch.bincount(new[:, 0], minlength=vocab)
    return float(chisquare(seen.numpy(), (drafted.target[0, 0].double().softmax(-1) * rows).numpy()).pvalue)


@pytest.mark.parametrize("name", ["baseline", "paper_exact", "fused"])
def test_lossless_ways_have_the_target_s_distribution(name):
    assert first_tokens(verification.methods((-1e3, 1e3))[name], many(20_000)) > 1e-3


def test_twin_the_sigmoid_is_seen_to_be_lossy():
    assert first_tokens(verification.methods((-1e3, 1e3))["sigmoid_lossy"], many(20_000)) < 1e-9


def test_the_batched_baseline_accepts_as_often_as_transformers_own():
    case, rows = many(2_000), 2_000

    def one(i: int) -> verification.Case:
        found = {k: v[i : i + 1] for k, v in vars(case).items() if isinstance(v, torch.Tensor)}
        return verification.replace(case, **found)

    alone = torch.cat([verification.baseline(one(i))[1] for i in range(rows)]).float()
    together = verification.baseline(case)[1].float()
    assert 0 < alone.mean() < 2
    spread = (alone.var() / rows + together.var() / rows).sqrt()
    assert abs(alone.mean() - together.mean()) < 4 * spread


class Tiny:
    """Texts of a tiny model; scored by nothing but their number."""

    metric, scale = "texts_written", (-1e3, 1e3)

    def __init__(self):
        self.target = load_target(make_model("llama", torch.float32))
        self.shapes, self.methods = [], []

    def __len__(self):
        return len(PROMPTS)

    def write(self, index, rule, shape, gamma, seed):
        self.shapes.append((shape.length, gamma))
        engine = Engine(self.target, ModelDrafter(self.target, self.target, gamma=gamma), shape=shape)
        engine.make_rule = lambda shape: rule(shape, self.target.vocab_size)
        self.methods.append(engine.make_rule(shape).method)
        done = engine.generate(PROMPTS[index], max_new_tokens=12, temperature=1.0, seed=seed)
        assert len(done.tokens) == 12
        return done.text

    def score(self, texts):
        return float(len(texts))


def test_a_table():
    """The draft model is the target: p = q, so every lossless way accepts all there is."""
    task = Tiny()
    main_part = sampling.tables(task, texts=3, fewer=1)[0]
    *steps, rows = sampling.measure(task, main_part)
    assert steps == [None] * 3
    assert [row["way"] for row in rows] == ["baseline", "paper_exact", "sigmoid_lossy", "fused"]
    assert task.methods[-12::4] == ["baseline", "paper_exact", "sigmoid_lossy"], "another one is first at each text"
    assert all(len(set(task.methods[-4 - i : -i or None])) == 4 for i in (0, 4, 8))
    for row in rows:
        assert row["texts_written"] == 3
        assert row["acceptance"] == pytest.approx(1.0)
        assert row["calls"] > 0
        assert row["profiling_seconds"] == pytest.approx(row["calls"] * row["call_microseconds"] / 1e6)
        assert row["profiling_seconds"] < row["wall_seconds"]
        assert row["bytes"] > 0
    assert rows[0]["profiling_reduction"] == 0
    found = sampling.headline(rows, "texts_written")
    assert found["fused_acceptance"] == 1
    assert "baseline_profiling_reduction" not in found


def test_several_samples_of_each_text():
    class Twice(Tiny):
        def write(self, index, rule, shape, gamma, seed):
            self.methods.append((index, seed))
            return super().write(index, rule, shape, gamma, seed)

    task = Twice()
    part = replace(sampling.tables(task, texts=2, fewer=1, samples=2)[0], methods={"fused": verification.fused})
    *steps, rows = sampling.measure(task, part, seed=5)
    assert len(steps) == sampling.total(task, part) == rows[0]["texts"] == 4
    assert [at for at in task.methods if isinstance(at, tuple)][-4:] == [(0, 5), (1, 6), (0, 7), (1, 8)]


def test_quality_has_the_error_of_a_mean():
    class Means(Tiny):
        metric = "mean"

        def __init__(self):
            pass

        def score(self, texts):
            return statistics.fmean(float(text) for _, text in texts)

    values = [0.2, 0.9, 0.4, 0.3]
    found = sampling.quality(Means(), [(i, str(v)) for i, v in enumerate(values)])
    assert found["mean"] == pytest.approx(statistics.fmean(values))
    assert found["mean_error"] == pytest.approx(statistics.stdev(values) / len(values) ** 0.5)
    assert sampling.quality(Means(), [(0, "0.5")]) == {"mean": 0.5, "mean_error": None}


def test_parts_are_the_paper_s_tables():
    every = sampling.tables(Tiny(), texts=9, fewer=2)
    assert [p.about["gamma"] for p in every if p.table == "8"] == [3, 5, 10, 15]
    assert [p.length for p in every if p.table == "8"] == [3, 5, 10, 15]
    assert [p.about["scale"] for p in every if p.table == "2, 7"] == [1e1, 1e3, 1e4, 1e5]
    assert every[0].gamma == Gamma(name="heuristic")
    assert every[0].texts == 9


def test_bytes_are_counted_by_what_happened():
    """Some refused, some not: a row of q more for each that was."""
    times = sampling.CallTimes(spans=[0.5, 0.5], moved=[(100, 110), (100, 110)])
    times.accepted = [torch.tensor([2, 1]), torch.tensor([2, 2])]
    times.drafted = [torch.tensor([2, 2]), torch.tensor([2, 2])]
    row = times.row()
    assert row["bytes"] == 410
    assert row["bytes_per_second"] == 410
    assert row["acceptance"] == 7 / 8


def test_rule_of_a_batch_is_lossless_at_any_length():
    """Rows that stop at different depths, several at once."""
    target = load_target(make_model("llama", torch.float32))
    times = sampling.CallTimes()
    shape = Shape(width=1, length=4)
    for name, way in verification.methods((-1e3, 1e3)).items():
        rule = sampling.TimedRule(RuleConfig(name="rejection"), shape, target.vocab_size, name, way, times)
        engine = Engine(target, ModelDrafter(target, target, gamma=Gamma(name="confidence")), shape=shape)
        engine.make_rule = lambda _, rule=rule: rule
        done = engine.generate(PROMPTS, max_new_tokens=12, temperature=1.0, seed=1)
        assert all(len(c.tokens) == 12 for c in done)
    assert max(int(n.max()) for n in times.drafted) > min(int(n.min()) for n in times.drafted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["summaries", "--data", "nowhere.jsonl"], "contains no articles"),
        (["speech", "--data", "nowhere"], "contains no clips"),
        (["speech", "--data", "nowhere", "--batch", "2"], "one by one"),
        (["summaries", "--data", "nowhere.jsonl", "--temperature", "0"], "above 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, message, capsys):
    assert main(["bench", "sampling", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("redrafter.cli.bench_sampling.load", lambda args: Tiny())
    file = tmp_path / "found.json"
    command = ["bench", "sampling", "summaries", "--data", "x", "--texts", "2", "--fewer", "1", "--save", str(file)]
    assert main(command) == 0
    saved = json.loads(file.read_text())
    assert len(saved["rows"]) == 4 + 4 * 4 + 4 * 2
    assert {row["table"] for row in saved["rows"]} == {"1, 5, 6", "8", "2, 7"}
    assert main(command) == 2, "nothing is overwritten"
