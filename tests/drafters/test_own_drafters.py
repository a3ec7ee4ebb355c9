"""Drafters that users write: mistakes that would change the text, or end it in the middle, are told in one line."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import redrafter
from redrafter import Engine, RuleConfig, SamplingParams, Shape
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.drafters import NgramDrafter, WithNgrams
from redrafter.engine.resolve import resolve_drafter
from redrafter.errors import ConfigError, RedrafterError
from redrafter.kernels.cpu import library
from redrafter.targets import load_target
from redrafter.targets.cpu.packed_load import from_module
from tests.helpers.zoo import PROMPTS, VOCAB, make_model

SHAPE = Shape(width=1, length=3)


class OtherRoot(NgramDrafter):
    """Gives the search another last token."""

    def draft(self, state, last, search):
        return super().draft(state, (last + 1) % VOCAB, search)


class Overwriting(NgramDrafter):
    """Changes the last tokens after the tree was made."""

    def draft(self, state, last, search):
        tree = super().draft(state, last, search)
        last += 1
        return tree


class Outside(NgramDrafter):
    """Guesses one token, wherever it lies."""

    def __init__(self, token):
        super().__init__()
        self.token = token

    def draft(self, state, last, search):
        beam = torch.full((len(last), 1, 3), self.token)
        return search.candidates(beam, torch.zeros(beam.shape), last)


@dataclass(frozen=True)
class Table:
    """A state whose tensor has no rows, or grows."""

    numbers: Tensor


class Shared(NgramDrafter):
    """One table for all rows in the state, where it does not belong."""

    def begin(self, tokens, lengths, hidden, slots):
        return Table(torch.zeros(7))


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(dtype=torch.float32, head_dim=16))


@pytest.fixture(scope="module")
def packed():
    if library.library() is None:
        pytest.skip("no C++ compiler here")
    own = make_model("llama", torch.float32, head_dim=16)
    return from_module(own, None, "llama", 8, lambda: own)


@pytest.mark.parametrize("drafter", [OtherRoot(), Overwriting()], ids=["other", "overwritten"])
def test_another_root_would_change_the_text(target, drafter):
    for params in ({}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}):  # on the host, and by tensors
        with pytest.raises(ConfigError, match=f"{type(drafter).__name__}.draft must give the search the last tokens"):
            Engine(target, drafter, shape=SHAPE).generate(PROMPTS, max_new_tokens=8, **params)
    assert Engine(target, NgramDrafter(), shape=SHAPE).generate(PROMPTS, max_new_tokens=8)


@pytest.mark.parametrize("token", [-1, VOCAB, 10_000_000])
def test_a_token_outside_the_vocabulary_is_no_crash(packed, token):
    with pytest.raises(ConfigError, match=f"a token outside the model's vocabulary of {VOCAB} tokens"):
        Engine(packed, Outside(token), shape=SHAPE).generate(PROMPTS, max_new_tokens=8)
    for last in (0, VOCAB - 1):
        drafted = Engine(packed, Outside(last), shape=SHAPE).generate(PROMPTS, max_new_tokens=8)
        plain = Engine(packed, Outside(last), shape=SHAPE).plain().generate(PROMPTS, max_new_tokens=8)
        assert [c.tokens for c in drafted] == [c.tokens for c in plain]


def test_a_state_without_rows(target):
    with pytest.raises(ConfigError, match=r"a drafter's state of \d rows holds a tensor of shape \(7,\): rows must"):
        Engine(target, Shared(), shape=SHAPE).generate(PROMPTS, max_new_tokens=8)


def test_candidates_of_another_form():
    sampling = Sampling.of([SamplingParams()] * 2, VOCAB, "cpu")
    rows = torch.zeros(2, dtype=torch.long)
    search = make_rule(RuleConfig(), SHAPE, VOCAB, torch.float32).search(sampling, rows, rows)
    beam, scores = torch.ones(2, 1, 3, dtype=torch.long), torch.zeros(2, 1, 3)
    assert search.candidates(beam, scores, rows).tokens.shape == (2, 4)
    for wrong in ((beam[:, 0], scores[:, 0]), (beam, scores[..., :2]), (beam[:1], scores[:1])):
        with pytest.raises(ConfigError, match=r"candidates and their scores must be \(B, W, L\) with B = 2, got \("):
            search.candidates(*wrong, rows)


def test_what_is_no_drafter_is_refused_before_it_is_used(target):
    with pytest.raises(ConfigError, match=r"NgramDrafter is a class: give an instance, NgramDrafter\(\)"):
        redrafter.load(target.model, drafter=NgramDrafter)

    class OnlyDrafts:
        layers = ()

        def draft(self, state, last, search):
            raise AssertionError

    with pytest.raises(ConfigError, match="OnlyDrafts is no drafter: it lacks begin, advance, keep, default_shape"):
        redrafter.load(target.model, drafter=OnlyDrafts())
    with pytest.raises(ConfigError, match="a drafter is a name, a folder, a causal LM or a drafter object, not 5"):
        redrafter.load(target.model, drafter=5)


def test_ngrams_do_not_mix_into_a_drafter_by_name_that_gives_no_probabilities(target, monkeypatch):
    class Own:
        """Built by name, and no drafter with a network."""

        def draft(self, state, last, search):
            raise AssertionError

    made = redrafter.engine.resolve._resolve

    def with_own(drafter, *rest):
        return Own() if drafter == "own" else made(drafter, *rest)

    monkeypatch.setattr(redrafter.engine.resolve, "_resolve", with_own)
    with pytest.raises(ConfigError, match=r"which Own does not: leave out \+ngram"):
        resolve_drafter("own+ngram", target)
    assert isinstance(resolve_drafter("own", target), Own)
    monkeypatch.setattr(Own, "gives_probabilities", True, raising=False)
    assert isinstance(resolve_drafter("own+ngram", target), WithNgrams), "it says that it does"
    with pytest.raises(RedrafterError, match="network"):
        resolve_drafter("ngram+ngram", target)


def test_a_name_that_describe_does_not_know_needs_the_model(monkeypatch):
    """A name added as docs/extending.md says is not described as the default drafter."""
    from redrafter.engine import describe

    asked = []
    real = describe.load_target

    def noted(model, **options):
        asked.append(model)
        return real(model, **options)

    monkeypatch.setattr(describe, "load_target", noted)
    monkeypatch.setattr(describe, "resolve_drafter", lambda name, target: replace_name(name))
    monkeypatch.setattr(describe, "_default_needs_weights", lambda *_: False)
    known = describe.describe(drafter="auto")
    assert (asked, known.drafter.startswith("recurrent+ngram")) == ([], True)
    assert describe.describe(drafter="follow").drafter.startswith("follow")
    assert asked == [None]


def replace_name(name):
    drafter = NgramDrafter()
    drafter.name = name
    return drafter
