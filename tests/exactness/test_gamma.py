"""Two-model decoding, whatever decides how far the draft model guesses: the same text, or the same distribution."""

import itertools
from dataclasses import replace

import pytest
import torch

import redrafter
from redrafter import Engine, Gamma, RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted
from redrafter.drafters import ModelDrafter, NoDrafter, causal_lm
from redrafter.errors import ConfigError
from redrafter.targets import Target, load_target
from tests.helpers.tables import P, V, chi_square, joint, run
from tests.helpers.zoo import PROMPTS, make_model

HOT = {"temperature": 1.0, "seed": 5}
GAMMAS = [
    Gamma(name="heuristic"),
    Gamma(name="heuristic", first=1),
    Gamma(name="confidence", threshold=0.3),
    Gamma(name="confidence", threshold=0.9),
]


def like(model, apart: float):
    """The model with noise in its weights: a draft model that is right now and then."""
    other = make_model("llama", bos_token_id=None)  # a copy: other settings are not kept
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * apart)
    return other


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


def engine_of(target, gamma, shape, apart=0.03, rule=None):
    torch.manual_seed(3)
    return Engine(
        target, ModelDrafter(load_target(like(target.model, apart)), target, gamma=gamma), shape=shape, rule=rule
    )


@pytest.mark.parametrize("options", [{}, HOT, HOT | {"top_k": 8}], ids=["greedy", "hot", "filtered"])
@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
def test_seeded_is_plain(target, gamma, options):
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=24, **options)]
    for shape in (Shape(width=1, length=6), Shape(width=3, length=5, nodes=9)):
        done = engine_of(target, gamma, shape).generate(PROMPTS, max_new_tokens=24, **options)
        assert [c.tokens for c in done] == plain
        accepted = [n for c in done for n in c.stats.accepted_per_step]
        assert 0 < sum(accepted) < sum(c.stats.nodes for c in done), "some guesses are right, some are not"


@pytest.mark.parametrize("gamma", GAMMAS, ids=str)
def test_rejection_at_temperature_0_is_plain(target, gamma):
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=24)]
    for branching in ((), (2, 1, 1, 2)):
        rule = RuleConfig(name="rejection", branching=branching)
        done = engine_of(target, gamma, Shape(width=1, length=6), rule=rule).generate(PROMPTS, max_new_tokens=24)
        assert [c.tokens for c in done] == plain


def nodes_by_step(engine, **options) -> list[int]:
    seen = [0]
    for part in engine.stream([PROMPTS[0]], max_new_tokens=60, **options):
        seen.append(part.stats.nodes)
    return [b - a for a, b in itertools.pairwise(seen[1:])]


def test_heuristic_grows_by_two_and_shrinks_by_one(target):
    right = Engine(target, ModelDrafter(target, target, gamma=Gamma(name="heuristic")), shape=Shape(width=1, length=10))
    assert nodes_by_step(right)[:5] == [5, 7, 9, 10, 10]
    wrong = engine_of(target, Gamma(name="heuristic"), Shape(width=1, length=10), apart=9.0)
    assert nodes_by_step(wrong)[:6] == [5, 4, 3, 2, 1, 1]


def test_confidence_stops_after_an_improbable_guess(target, monkeypatch):
    def guesses(threshold: float) -> float:
        passes = 0
        gamma = Gamma(name="confidence", threshold=threshold)
        engine = engine_of(target, gamma, Shape(width=1, length=6))
        forward = engine.drafter.model.forward

        def counting(*args, **options):
            nonlocal passes
            passes += 1
            return forward(*args, **options)

        monkeypatch.setattr(engine.drafter.model, "forward", counting)
        nodes = nodes_by_step(engine, **HOT)
        assert passes == 2 + sum(nodes), "room for the state, the prompt, then one for each guess: none is for nothing"
        return sum(nodes) / len(nodes)

    assert guesses(0.0) == 6
    assert 1 < guesses(0.4) < 6
    assert guesses(1.0) == 1


def guesses_alone_and_together(target, gamma):
    engine = engine_of(target, gamma, Shape(width=1, length=6))
    together = engine.generate(PROMPTS, max_new_tokens=24, **HOT)
    alone = [engine.generate(p, max_new_tokens=24, **HOT) for p in PROMPTS]
    return [c.stats.nodes for c in alone], [c.stats.nodes for c in together]


@pytest.mark.parametrize("gamma", [GAMMAS[0], GAMMAS[2]], ids=str)
def test_rows_have_their_own_limits(target, gamma, monkeypatch):
    """Alone or in a batch, a row guesses as far. Twin: one limit for all rows."""
    alone, together = guesses_alone_and_together(target, gamma)
    assert alone == together
    monkeypatch.setattr(causal_lm, "within", lambda tree, limit: tree)
    alone, together = guesses_alone_and_together(target, gamma)
    assert alone != together


def test_gamma_is_for_draft_models(target):
    with pytest.raises(ConfigError, match="gamma is for a drafter that is a causal LM, and this is NgramDrafter"):
        redrafter.load(target.model, "ngram", gamma="heuristic")
    with pytest.raises(ConfigError, match="gamma must be one of constant, heuristic, confidence, got 'often'"):
        redrafter.load(target.model, "ngram", gamma="often")
    engine = redrafter.load(target.model, like(target.model, 0.0), gamma="confidence:0.25")
    assert engine.drafter.gamma == Gamma(name="confidence", threshold=0.25)


# The rejection rule's distribution, with a draft model that is a table.

ROWS, TOKENS = 20_000, 4
SOUND, UNSOUND = 1e-3, 1e-9
SAMPLED = SamplingParams(temperature=1.0)
DRAFTS = P.mean(0) * 1.5  # (V, V): what follows a token, by what it makes of the target


class TableModel(Target):
    """A draft model as ModelDrafter sees one; it needs no cache."""

    name, tokenizer, vocab_size, device = "table", None, V, torch.device("cpu")
    recurrent = False

    def __init__(self):
        pass

    def prefill(self, tokens, lengths, cache, layers):
        pass

    def forward(self, tokens, *rest):
        return DRAFTS[tokens], None


def rejected(gamma: Gamma, branching: tuple[int, ...]) -> float:
    """p-value of texts that it drafted."""
    one = torch.ones(ROWS, dtype=torch.long)
    drafter = ModelDrafter(TableModel(), TableModel(), gamma=gamma)
    state = drafter.begin(0 * one[:, None], one, torch.zeros(ROWS, 1, 0), 100)
    state = drafter.advance(state, Accepted(one[:, None], one[:, None], one, 0 * one, 0 * one), torch.zeros(ROWS, 1, 0))
    rule = RuleConfig(name="rejection", branching=branching)
    return chi_square(run(rule, Shape(), SAMPLED, ROWS, TOKENS, drafter, state), joint(SAMPLED, TOKENS))


@pytest.mark.parametrize("gamma", [Gamma(name="heuristic", first=2), Gamma(name="confidence", threshold=0.3)], ids=str)
@pytest.mark.parametrize("branching", [(1, 1, 1), (2, 1)], ids=str)
def test_rejection_distribution(gamma, branching):
    assert rejected(gamma, branching) > SOUND


def test_twin_an_improbable_guess_is_dropped(monkeypatch):
    """Dropped itself, instead of being the last: draws are then chosen among, and the distribution is another."""

    def dropping(tree, limit):
        q = tree.draft_logits.softmax(-1).gather(2, tree.tokens[:, 1:, None])[..., 0]
        sure = torch.cat([tree.valid[:, :1], q >= 0.3], 1).cumprod(1).bool()
        return replace(tree, valid=tree.valid & sure)

    monkeypatch.setattr(causal_lm, "within", dropping)
    assert rejected(Gamma(name="confidence", threshold=0.0), (1, 1, 1)) < UNSOUND
