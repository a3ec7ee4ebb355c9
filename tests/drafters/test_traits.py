"""What a drafter says of itself: the defaults of a drafter that says nothing, and what each of our own says."""

import pytest
import torch

from benchmarks import step_times
from benchmarks.step_times import DummyDrafter
from redrafter.config import Shape
from redrafter.core.tree import root_tree
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams
from redrafter.drafters.traits import (
    copies,
    drafts,
    gives_probabilities,
    identity_of,
    keeps_cache,
    longest_chain,
    network_of,
    only_copies,
    recall_of,
)
from redrafter.drafters.with_ngrams import DEEPEST
from redrafter.engine import Engine
from redrafter.engine.exactness import why_ties
from redrafter.engine.resolve import resolve_drafter
from redrafter.errors import ConfigError
from redrafter.serve.batches import make_batch
from redrafter.serve.config import ServeConfig
from redrafter.serve.server import past_answers
from redrafter.targets import load_target
from redrafter.tuning.at_rest import tune
from tests.helpers.zoo import make_model, peer_drafter, recurrent_drafter

SHAPE = Shape(width=1, length=2)


class Own:
    """A drafter as a user writes it, with nothing more than `core.step.Drafter` asks for."""

    layers = ()
    default_shape = SHAPE

    def begin(self, tokens, lengths, hidden, slots):
        return None

    def draft(self, state, last, search):
        return root_tree(last)

    def advance(self, state, accepted, hidden):
        return None

    def keep(self, state, rows):
        return None


class Copying(Own):
    """Says that it copies."""

    copies = True


class OnlyCopying(Copying):
    """Says that it has no network as well."""

    network_drafter = None


class WithNetwork(Own):
    """Has attributes of its own whose names are near."""

    def __init__(self):
        self.network = torch.nn.Linear(2, 2)
        self.copies = 3
        self.recall = 0.9
        self.identity = object()


class Silent(NoDrafter):
    """Inherits what it has not written, and drafts."""

    def draft(self, state, last, search):
        return Own().draft(state, last, search)


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


def said(drafter):
    asked = (network_of, copies, only_copies, drafts, longest_chain, keeps_cache, gives_probabilities)
    return tuple(ask(drafter) for ask in asked)


@pytest.mark.parametrize("kind", [Own, WithNetwork, Silent])
def test_a_drafter_that_says_nothing_guesses_by_itself_and_copies_nothing(kind):
    drafter = kind()
    assert said(drafter) == (drafter, False, False, True, 0, False, False)
    assert recall_of(drafter) is None
    assert identity_of(drafter) == f"tests.drafters.test_traits.{kind.__name__}"


def test_a_drafter_that_says_that_it_copies():
    copying, only = Copying(), OnlyCopying()
    assert said(copying) == (copying, True, False, True, 0, False, False)
    assert said(only) == (None, True, True, True, 0, False, False)
    assert recall_of(copying) is None, "it has no method for it"
    assert said(WithNgrams(copying)) == (copying, True, False, True, DEEPEST, False, False)


def test_our_own_drafters(target):
    none, ngram, model = NoDrafter(), NgramDrafter(), ModelDrafter(target, target)
    assert said(none) == (None, False, False, False, 0, False, False)
    assert said(ngram) == (None, True, True, True, 0, False, False)
    assert said(model) == (model, False, False, True, 0, True, True)
    assert said(WithNgrams(model)) == (model, True, False, True, DEEPEST, True, False)
    for net in (recurrent_drafter(target), peer_drafter("medusa", target), peer_drafter("eagle", target)):
        assert said(net) == (net, False, False, True, 0, False, True)
        assert said(WithNgrams(net)) == (net, True, False, True, DEEPEST, False, False)
    dummy = DummyDrafter(none)
    assert said(dummy) == (dummy, False, False, True, 0, False, False), "it inherits from NoDrafter, and drafts"
    assert [recall_of(x) for x in (none, model)] == [None, None]
    assert recall_of(ngram) == ngram.recall
    mixed = WithNgrams(model)
    assert recall_of(mixed) == mixed.recall


def test_identities_tell_drafters_that_draft_otherwise(target):
    first, again, other = (recurrent_drafter(target) for _ in range(3))
    with torch.no_grad():
        next(other.net.parameters()).add_(1)
    assert identity_of(first) == identity_of(again) != identity_of(other)
    assert identity_of(first).split()[0] == "recurrent"
    assert identity_of(WithNgrams(first)) == f"{identity_of(first)} with n-grams"
    assert identity_of(NgramDrafter(5, 3)) == "ngram 3-5"
    assert identity_of(WithNgrams(Own())) == "tests.drafters.test_traits.Own with n-grams"
    assert identity_of(ModelDrafter(target, target)).startswith("model ")
    assert identity_of(NoDrafter()) == "redrafter.drafters.none.NoDrafter"


@pytest.mark.parametrize("kind", [Own, WithNetwork, Silent, Copying, OnlyCopying, NgramDrafter])
def test_what_drafts_is_tuned_and_served_as_a_drafter(target, kind):
    engine = Engine(target, kind())
    assert engine.drafts
    assert Engine(target, kind(), adapts=True).planner is not None
    assert not engine.plain().drafts


def test_plain_decoding_has_nothing_to_adapt_tune_or_serve(target):
    engine = Engine(target, NoDrafter(), adapts=True)
    assert (engine.drafts, engine.adapts, engine.planner) == (False, False, None)
    with pytest.raises(ConfigError, match="there is nothing to tune: name a drafter"):
        tune(engine)


class Recalling(Copying):
    """Copies from remembered answers as well."""

    def recall(self, state, past, sizes):
        return state


def test_remembered_answers_need_a_drafter_that_recalls(target):
    config = ServeConfig(rows=1, context=90, remember_answers=1000)
    recurrent = recurrent_drafter(target)
    for drafter in (NoDrafter(), Own(), WithNetwork(), Copying(), recurrent):
        with pytest.raises(ConfigError, match=r"add \+ngram"):
            past_answers(Engine(target, drafter), config)
    for drafter in (Recalling(), NgramDrafter(), WithNgrams(recurrent)):
        assert past_answers(Engine(target, drafter), config) is not None


@pytest.mark.parametrize("mixed", [False, True])
def test_steps_of_a_drafter_with_a_cache_are_not_recorded(target, mixed):
    kept = Own()
    kept.keeps_cache = True
    reasons = [why_ties(target, WithNgrams(x) if mixed else x, recorded=True, compiles=False) for x in (kept, Own())]
    assert "not recorded" in reasons[0]
    assert "not recorded" not in reasons[1]


@pytest.mark.parametrize("deepest", [None, 9])
def test_a_long_chain_takes_room_in_a_timed_context(target, monkeypatch, deepest):
    drafter, asked = Own(), []
    if deepest is not None:
        drafter.longest_chain = deepest
    real = step_times.tokens_per_round
    monkeypatch.setattr(step_times, "tokens_per_round", lambda *given: asked.append(given) or real(*given))
    batch = make_batch(Engine(target, drafter), ServeConfig(rows=1, context=90), [SHAPE])
    step_times.time_steps(batch, 1, [SHAPE], [[1, 2, 3]], step_times.TimingBudget(turns=1, steps=1))
    assert asked == [([SHAPE], deepest or 0)]


def test_gamma_names_the_drafter_that_has_none(target):
    recurrent = recurrent_drafter(target)
    for drafter, name in ((None, "NoDrafter"), ("ngram", "NgramDrafter"), (WithNgrams(recurrent), "RecurrentDrafter")):
        with pytest.raises(ConfigError, match=f"a causal LM, and this is {name}:"):
            resolve_drafter(drafter, target, "heuristic:3")
    model = WithNgrams(ModelDrafter(target, target))
    assert resolve_drafter(model, target, "heuristic:3") is model
