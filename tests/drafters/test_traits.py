"""What a drafter says of itself: the defaults of a drafter that says nothing, and what each of our own says."""

import pytest
import torch

from redrafter.config import Shape
from redrafter.core.tree import root_tree
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams
from redrafter.drafters.traits import (
    copies,
    drafts,
    identity_of,
    keeps_cache,
    longest_chain,
    network_of,
    only_copies,
    recall_of,
)
from redrafter.drafters.with_ngrams import DEEPEST
from redrafter.targets import load_target
from tests.helpers.zoo import make_model, peer_drafter, recurrent_drafter


class Own:
    """A drafter as a user writes it, with nothing more than `core.step.Drafter` asks for."""

    layers = ()
    default_shape = Shape(width=1, length=2)

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
    asked = (network_of, copies, only_copies, drafts, longest_chain, keeps_cache)
    return tuple(ask(drafter) for ask in asked)


@pytest.mark.parametrize("kind", [Own, WithNetwork, Silent])
def test_a_drafter_that_says_nothing_guesses_by_itself_and_copies_nothing(kind):
    drafter = kind()
    assert said(drafter) == (drafter, False, False, True, 0, False)
    assert recall_of(drafter) is None
    assert identity_of(drafter) == f"tests.drafters.test_traits.{kind.__name__}"


def test_a_drafter_that_says_that_it_copies():
    copying, only = Copying(), OnlyCopying()
    assert said(copying) == (copying, True, False, True, 0, False)
    assert said(only) == (None, True, True, True, 0, False)
    assert recall_of(copying) is None, "it has no method for it"
    mixed = WithNgrams(copying)
    assert said(mixed) == (copying, True, False, True, DEEPEST, False)


def test_our_own_drafters(target):
    none, ngram, model = NoDrafter(), NgramDrafter(), ModelDrafter(target, target)
    assert said(none) == (None, False, False, False, 0, False)
    assert said(ngram) == (None, True, True, True, 0, False)
    assert said(model) == (model, False, False, True, 0, True)
    assert said(WithNgrams(model)) == (model, True, False, True, DEEPEST, True)
    for net in (recurrent_drafter(target), peer_drafter("medusa", target), peer_drafter("eagle", target)):
        assert said(net) == (net, False, False, True, 0, False)
        assert said(WithNgrams(net)) == (net, True, False, True, DEEPEST, False)
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
