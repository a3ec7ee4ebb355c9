"""Lossless rules have the target's distribution over whole texts; unsound ones are seen not to."""

from dataclasses import dataclass, replace

import pytest
import torch

from redrafter import RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted
from redrafter.core.noise import DRAFT, RESIDUAL
from redrafter.core.rules import make_rule
from redrafter.core.rules.beam_search import BeamSearch
from redrafter.core.rules.rejection import RejectionRule, accept_rejection
from redrafter.core.rules.sampled_tree import SampledSearch
from redrafter.core.sampling import Sampling, node_logits, restrict
from tests.helpers.tables import Before, Q, TableDrafter, V, chi_square, joint, run

ROWS, TOKENS = 20_000, 4
SOUND, UNSOUND = 1e-3, 1e-9
HOT = SamplingParams(temperature=1.0)
COOL = SamplingParams(temperature=0.7, top_k=3)


@pytest.mark.parametrize("params", [HOT, COOL], ids=["hot", "filtered"])
@pytest.mark.parametrize("shape", [Shape(width=1, length=3), Shape(width=3, length=3, nodes=5)], ids=["chain", "tree"])
def test_seeded(shape, params):
    texts = run(RuleConfig(), shape, params, ROWS, TOKENS)
    assert chi_square(texts, joint(params, TOKENS)) > SOUND


@pytest.mark.parametrize("params", [HOT, COOL], ids=["hot", "filtered"])
@pytest.mark.parametrize("branching", [(1,), (1, 1, 1), (2,), (3, 1), (2, 2, 1), (4, 1)], ids=str)
def test_rejection(branching, params):
    rule = RuleConfig(name="rejection", branching=branching)
    texts = run(rule, Shape(), params, ROWS, TOKENS)
    assert chi_square(texts, joint(params, TOKENS)) > SOUND


def test_rejection_at_temperature_0_is_greedy():
    greedy = run(RuleConfig(), Shape(width=1, length=2), SamplingParams(), 50, 8)
    for branching in ((1, 1), (2, 1), (3,)):
        texts = run(RuleConfig(name="rejection", branching=branching), Shape(), SamplingParams(), 50, 8)
        assert torch.equal(texts, greedy)


def test_rejection_in_fp32_with_a_sharp_drafter():
    """What is left of q after its favourite is refused is smaller than any fp32 number."""
    rows = 20_000
    draft = torch.tensor([0.0, -9.0, -9.1, -9.5])
    target = torch.tensor([-5.0, 1.0, 1.0, 1.0])
    sampling = Sampling.of([SamplingParams(temperature=0.1)] * rows, V, "cpu")
    rule = make_rule(RuleConfig(name="rejection", branching=(2,)), Shape(), V, torch.float32)
    zero = torch.zeros(rows, dtype=torch.long)
    search = rule.search(sampling, torch.arange(rows), zero)
    tree = search.tree(lambda state, tokens, parents: (draft.expand(*tokens.shape, V), state), None, zero)
    accepted = rule.accept(search, tree, target.expand(rows, tree.nodes + 1, V), None)
    assert chi_square(accepted.tokens[:, :1], (target / 0.1).double().softmax(-1)) > SOUND


def test_more_children_are_accepted_more_often():
    def steps(branching: tuple[int, ...]) -> int:
        counted = 0

        class Counting(RejectionRule):
            def accept(self, *args):
                nonlocal counted
                counted += 1
                return super().accept(*args)

        config = RuleConfig(name="rejection", branching=branching)
        run(Counting(config, Shape(), V), Shape(), HOT, 1, 400)
        return counted

    assert steps((3, 1)) < steps((1, 1))


# The twins: each is a plausible shortcut, and each changes the distribution.


@dataclass(frozen=True)
class BeamSearchedRejection(RejectionRule):
    """The published reference: p/q on the best path of a beam search."""

    def search(self, sampling, seeds, lengths):
        sampled = super().search(sampling, seeds, lengths)
        length = len(self.branching)
        noise = torch.zeros(len(lengths), length + 1, V, dtype=torch.float64)
        return _SearchedNotSampled(
            BeamSearch(Shape(width=1, length=length), sampling, lambda count: noise, seeds, lengths), sampled
        )

    def accept(self, search, tree, logits, counts):
        return super().accept(search.sampled, tree, logits, counts)


@dataclass(frozen=True)
class _SearchedNotSampled:
    beam: BeamSearch
    sampled: SampledSearch

    @property
    def shape(self):
        return self.beam.shape

    def tree(self, advance, state, last, token_ids=None):
        tree = self.beam.tree(advance, state, last, token_ids)
        before = torch.cat([state[:, :1], tree.tokens[:, :-2]], 1) if tree.length > 1 else state[:, :1]
        q = Q[before, tree.tokens[:, :-1]].log_softmax(-1)
        return replace(tree, draft_logits=q)


def test_twin_p_over_q_on_beam_searched_drafts():
    rule = BeamSearchedRejection(RuleConfig(name="rejection", branching=(1, 1)), Shape(), V)
    texts = run(rule, Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND


@dataclass(frozen=True)
class OneStreamRejection(RejectionRule):
    """The numbers that drew the guess also judge it."""

    def accept(self, search, tree, logits, counts) -> Accepted:
        return accept_rejection(
            restrict(node_logits(logits, search.sampling, counts, tree), search.sampling),
            tree.draft_logits.log_softmax(-1),
            tree,
            branching=self.branching,
            temperature=search.sampling.temperature,
            seeds=search.seeds,
            positions=search.positions,
            streams=(DRAFT, RESIDUAL),
        )


def test_twin_one_stream_for_drafting_and_accepting():
    rule = OneStreamRejection(RuleConfig(name="rejection", branching=(1, 1)), Shape(), V)
    texts = run(rule, Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND


def test_twin_typical_is_lossy():
    texts = run(RuleConfig(name="typical"), Shape(width=3, length=3), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND


def test_twin_one_seed_for_all_rows():
    """With a shared seed every row says the same: the test itself must notice."""
    rule = make_rule(RuleConfig(), Shape(width=1, length=2), V, torch.float64)
    texts = run(rule, Shape(width=1, length=2), HOT, 1, TOKENS).expand(ROWS, -1)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND


def test_draft_is_sampled_from_q():
    """The first child of a sampled tree has the drafter's own distribution."""
    rule = make_rule(RuleConfig(name="rejection", branching=(2,)), Shape(), V, torch.float64)
    rows = 20_000
    sampling = Sampling.of([HOT] * rows, V, "cpu")
    one = torch.ones(rows, dtype=torch.long)
    search = rule.search(sampling, torch.arange(rows), one)
    tree = TableDrafter(one).draft(Before(0 * one), one, search)
    q = Q[0, 1].softmax(-1)
    assert chi_square(tree.tokens[:, 1:2], q) > SOUND
    pair = torch.zeros(V, V, dtype=torch.float64)  # in order, without replacement
    for a in range(V):
        for b in range(V):
            pair[a, b] = q[a] * q[b] / (1 - q[a]) if a != b else 0.0
    assert chi_square(tree.tokens[:, 1:], pair.flatten()) > SOUND
