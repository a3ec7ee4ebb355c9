"""What an engine promises, with the trial of bits replaced: no CPU has kernels with fixed sums."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import redrafter
from redrafter import Engine, RuleConfig, Shape
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter
from redrafter.engine import engine as engine_module
from redrafter.engine import exactness
from redrafter.engine.exactness import Promise, weakest
from redrafter.errors import ConfigError, NotExact
from redrafter.kernels.tree_attention.naive import DEEPEST, NEWEST
from redrafter.runtime.batch import Batch
from redrafter.runtime.row import Request
from redrafter.targets import load_target
from redrafter.targets.cuda import verifier as verifier_module
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.cuda.verifier import verifier
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter

TREE = Shape(width=3, length=3)


@pytest.fixture
def target():
    return load_target(make_model("llama", torch.float32))


@pytest.fixture
def tried(monkeypatch):
    """The verifiers that were tried, and the verdict that each of them gets."""
    made = SimpleNamespace(verdict=True, verifiers=[])
    monkeypatch.setattr(verifier_module, "same_bits", lambda found: (made.verifiers.append(found), made.verdict)[1])
    return made


def recorded(target, drafter, **options) -> Engine:
    """An engine whose steps run over fixed buffers, on a CPU too."""
    engine = Engine(target, drafter, runtime="graphs", **options)
    engine.recorded = True
    return engine


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("drafter", [NoDrafter, NgramDrafter])
def test_the_verdict_decides(target, tried, verdict, drafter):
    """Also the twin of an engine that ignores the verdict: both values are told apart."""
    tried.verdict = verdict
    engine = recorded(target, drafter())
    assert engine.exactness == ("bitwise" if verdict else "ties")
    assert (engine.promise().reason == "") == verdict
    assert engine.plain().promise().reason.startswith("on a CPU"), "the plain engine was made anew, not recorded"


def test_each_verifier_is_tried_once(target, tried):
    engine = recorded(target, NgramDrafter())
    for _ in range(3):
        assert engine.exactness == "bitwise"
        assert recorded(target, NoDrafter()).exactness == "bitwise"
    assert tried.verifiers == [verifier(target, False)]
    assert tried.verifiers[0].same_bits is True


def test_the_trial_comes_before_anything_is_recorded(target, monkeypatch):
    events = []
    whole = Batch.__init__
    monkeypatch.setattr(verifier_module, "same_bits", lambda found: (events.append("trial"), True)[1])
    monkeypatch.setattr(Batch, "__init__", lambda *a, **k: (events.append("batch"), whole(*a, **k))[1])
    recorded(target, NoDrafter()).generate(PROMPTS[0], max_new_tokens=3)
    assert events == ["trial", "batch"]


def test_a_trial_that_fails_promises_ties(target, monkeypatch, caplog):
    def fail(found):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(verifier_module, "same_bits", fail)
    assert recorded(target, NoDrafter()).exactness == "ties"
    assert "cannot be compared (RuntimeError: no such kernel)" in caplog.text


def not_recorded(target):
    return Engine(target, NgramDrafter())


def causal_lm(target):
    return recorded(target, ModelDrafter(load_target(make_model("llama", torch.float32)), target))


@pytest.mark.parametrize(
    ("make", "words"),
    [(not_recorded, "on a CPU"), (causal_lm, "a causal LM or an MTP module as drafter")],
)
def test_only_ties_whatever_the_verdict(target, tried, make, words):
    engine = make(target)
    assert engine.exactness == "ties"
    assert words in engine.promise().reason
    assert tried.verifiers == [], "nothing to try"


def test_a_beam_deeper_than_a_tree_may_be_keeps_the_bits(target, tried):
    """Recorded steps verify its first tokens only."""
    engine = recorded(target, NgramDrafter(), shape=Shape(width=1, length=2 * NEWEST))
    assert engine.exactness == "bitwise"
    done = engine.generate([1, 2] * 30, max_new_tokens=40)
    assert max(done.stats.accepted_per_step) <= DEEPEST
    assert done.tokens == recorded(target, NoDrafter()).generate([1, 2] * 30, max_new_tokens=40).tokens


def test_the_models_own_attention(tried):
    engine = recorded(load_target(make_model("llama", torch.float64)), NoDrafter())
    assert engine.exactness == "ties"
    assert "tree attention kernel" in engine.promise().reason


@pytest.mark.parametrize(("rule", "words"), [("rejection", "distribution"), ("typical", "lossy")])
def test_rules_that_promise_no_tokens(target, tried, rule, words):
    engine = recorded(target, recurrent_drafter(target), shape=TREE, rule=RuleConfig(name=rule))
    assert engine.exactness is None
    assert words in engine.promise().reason
    done = engine.generate(PROMPTS[0], max_new_tokens=4, temperature=1.0, seed=1)
    assert done.stats.exactness is None


def statistics(target, **options) -> str | None:
    engine = recorded(target, recurrent_drafter(target), shape=TREE)
    return engine.generate(PROMPTS[0], max_new_tokens=6, **options).stats.exactness


@pytest.mark.parametrize("verdict", [True, False])
def test_statistics(target, tried, verdict):
    tried.verdict = verdict
    assert statistics(target) == ("bitwise" if verdict else "ties")


def same_scores(input_ids, scores):
    return scores


@pytest.mark.parametrize("how", ["recorded", "processor", "many prompts"])
def test_every_pass_is_the_one_that_was_tried(target, tried, monkeypatch, how):
    """Prompts that are read apart from steps, and steps that run one by one, go through the verifier too."""
    engine = recorded(target, NgramDrafter())
    engine.generate([1, 2, 3], max_new_tokens=2)  # the self-check compares with the model's own attention
    monkeypatch.setattr(type(target), "forward", lambda *a, **k: pytest.fail("a pass with the model's own attention"))
    options = {"logits_processor": [same_scores]} if how == "processor" else {}
    prompts = [[1, 2, 3, 1, 2, 3], [4, 5]] if how == "many prompts" else [[1, 2, 3, 1, 2, 3]]
    engine.generate(prompts, max_new_tokens=4, **options)


@pytest.mark.parametrize("verdict", [None, False])
def test_a_batch_that_was_made_before_the_trial_keeps_the_promise(target, monkeypatch, verdict):
    """As that of a server; the twin, whose trial failed before, reads by the model's own attention."""
    verifier(target, False).same_bits = verdict
    batch = Batch(target, NoDrafter(), rows=1, context=60, shapes=(), recorded=True, runtime="graphs")
    passes, run = [], TreeTarget.run
    monkeypatch.setattr(TreeTarget, "run", lambda *a, **k: (passes.append(a), run(*a, **k))[1])
    batch.read_all([batch.open(Request(prompt=[1, 2, 3], max_new_tokens=4, seed=1))])
    assert len(passes) == (verdict is None)


def test_twin_a_pass_with_the_models_own_attention_is_noticed(target, monkeypatch):
    engine = Engine(target, NgramDrafter())  # on a CPU, not recorded
    monkeypatch.setattr(type(target), "forward", lambda *a, **k: pytest.fail("a pass with the model's own attention"))
    with pytest.raises(pytest.fail.Exception):
        engine.generate([1, 2, 3], max_new_tokens=4)


@pytest.mark.parametrize("verdict", [False, True])
def test_a_verifier_that_fails_is_passed_by_where_bits_differ_anyway(target, tried, monkeypatch, verdict):
    tried.verdict = verdict
    want = recorded(target, NgramDrafter()).generate(PROMPTS[0], max_new_tokens=6).tokens

    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(TreeTarget, "run", fail)
    engine = recorded(target, NgramDrafter())
    if verdict:  # the twin: the model's own attention would break the promise
        with pytest.raises(RuntimeError, match="no such kernel"):
            engine.generate(PROMPTS[0], max_new_tokens=6)
    else:
        assert engine.generate(PROMPTS[0], max_new_tokens=6).tokens == want


def test_a_drafter_that_runs_the_same_model_keeps_its_own_cache(target, tried):
    want = Engine(target, NoDrafter()).generate(PROMPTS[0], max_new_tokens=8).tokens
    engine = recorded(target, ModelDrafter(target, target), shape=Shape(width=2, length=2, nodes=3))
    assert engine.generate(PROMPTS[0], max_new_tokens=8).tokens == want


def test_require(target, tried, monkeypatch):
    monkeypatch.setattr(exactness, "why_ties", lambda *a, **k: "")
    assert Engine(target, NgramDrafter(), exact="require").exactness == "bitwise"
    monkeypatch.undo()
    with pytest.raises(NotExact, match="on a CPU the last bits") as refused:
        Engine(target, NgramDrafter(), exact="require")
    assert "\n" not in str(refused.value)
    with pytest.raises(NotExact, match="keeps the distribution"):
        Engine(target, NgramDrafter(), rule=RuleConfig(name="rejection"), exact="require")
    with pytest.raises(ConfigError, match="exact must be one of auto, require, got 'yes'"):
        Engine(target, NgramDrafter(), exact="yes")


def test_load_requires(monkeypatch, target):
    monkeypatch.setattr(engine_module, "load_target", lambda *a, **k: target)
    with pytest.raises(NotExact):
        redrafter.load(drafter="ngram", exact="require")
    monkeypatch.setattr(exactness, "why_ties", lambda *a, **k: "")
    assert redrafter.load(drafter="ngram", exact="require").exact == "require"


def test_custom_generate_tries_nothing(target, monkeypatch):
    monkeypatch.setattr(exactness, "make_promise", lambda *a, **k: pytest.fail("tried"))
    monkeypatch.setattr(engine_module, "make_promise", lambda *a, **k: pytest.fail("tried"))
    ids = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    target.model.generate(ids, custom_generate=redrafter.custom_generate, drafter="ngram", **options)


def test_statistics_hold_no_engine(target, tried):
    engine = recorded(target, NgramDrafter())
    stats = engine.generate(PROMPTS[0], max_new_tokens=3).stats
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert stats.exactness == "bitwise"


def test_words():
    assert Promise("bitwise").sentence(torch.bfloat16).startswith("bitwise: text equals plain decoding")
    assert "ties (scores less than 0.25 apart), because of this" in Promise("ties", "of this").sentence(torch.bfloat16)
    assert Promise(None, "a rule").sentence(torch.bfloat16) == "no promise about tokens: a rule"
    assert weakest(["bitwise", "bitwise"]) == "bitwise"
    assert weakest(["bitwise", None, "ties"]) is None
