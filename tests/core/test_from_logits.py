"""Verification from logits: the rules' own choices, the target's distribution; unsound ways are seen not to have it."""

from dataclasses import dataclass

import pytest
import torch
from tables import V, chi_square, joint, run

from redrafter import RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted
from redrafter.core.noise import ACCEPT, DRAFT, RESIDUAL, gumbel, uniform
from redrafter.core.rules import RejectionRule
from redrafter.core.sampling import Sampling, node_scores, restrict
from redrafter.core.verify import floors, rejection_from_logits
from redrafter.kernels.verify import paper

ROWS, TOKENS = 20_000, 4
SOUND, UNSOUND = 1e-3, 1e-9
HOT = SamplingParams(temperature=1.0)
COOL = SamplingParams(temperature=0.7, top_k=3)
CHAIN = RuleConfig(name="rejection", branching=(1, 1, 1))


@dataclass(frozen=True)
class FromLogits(RejectionRule):
    """The rejection rule with the kernel's oracle in its place."""

    streams: tuple[int, int] = (ACCEPT, RESIDUAL)

    def judge(self, target, draft, tokens, search):
        rows = {"seeds": search.seeds, "positions": search.positions}
        heat = (search.sampling.temperature > 0).to(target.dtype)  # scores and draft_logp are tempered already
        full = torch.full_like(search.positions, tokens.shape[1])
        return rejection_from_logits(target, draft, tokens, counts=full, temperature=heat, streams=self.streams, **rows)

    def accept(self, search, tree, logits, counts):
        scores = node_scores(logits, search.sampling, counts, tree)
        new, accepted = self.judge(scores, tree.draft_logp, tree.tokens[:, 1:], search)
        path = torch.arange(tree.length + 1).expand_as(new)
        return Accepted(path, new, accepted + 1, accepted, tree.valid.sum(1) - 1)


@pytest.mark.parametrize("params", [HOT, COOL, SamplingParams()], ids=["hot", "filtered", "greedy"])
def test_chooses_what_the_rejection_rule_chooses(params):
    """Token for token, in fp64, where rounding flips nothing."""
    rows = 2_000
    want = run(CHAIN, Shape(), params, rows, 8)
    assert torch.equal(run(FromLogits(CHAIN, Shape(), V), Shape(), params, rows, 8), want)


@pytest.mark.parametrize("params", [HOT, COOL], ids=["hot", "filtered"])
def test_distribution(params):
    texts = run(FromLogits(CHAIN, Shape(), V), Shape(), params, ROWS, TOKENS)
    assert chi_square(texts, joint(params, TOKENS)) > SOUND


def test_floors_keep_what_the_filters_keep():
    many = [
        SamplingParams(temperature=0.5, top_k=7),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=1.0),
    ]
    sampling = Sampling.of(many, 100, "cpu")
    target, draft = (torch.randn(4, 4, 100).bfloat16().float() * 2 for _ in range(2))  # bf16: equal logits
    draft = draft[:, :3]
    kept = restrict(target, sampling) > -torch.inf
    assert torch.equal(target >= floors(target, sampling)[..., None], kept)
    rows = {"seeds": torch.arange(4), "positions": torch.arange(4), "counts": torch.full((4,), 3)}
    tokens = restrict(draft, sampling).argmax(-1)
    raw = rejection_from_logits(
        target, draft, tokens, temperature=sampling.temperature,
        floors=(floors(target, sampling), floors(draft, sampling)), **rows,
    )  # fmt: skip
    done = rejection_from_logits(
        restrict(target, sampling), restrict(draft, sampling), tokens, temperature=torch.ones(4), **rows
    )
    assert all(torch.equal(a, b) for a, b in zip(raw, done, strict=True))


def given(search, tokens):
    """The same random numbers for the paper's ways: coins, and the race at each place."""
    gamma = tokens.shape[1]
    ahead = search.positions[:, None] + 1 + torch.arange(gamma + 1)
    coins = uniform(search.seeds, ahead[:, :gamma], 1, stream=ACCEPT, dtype=torch.float64)[..., 0]
    return coins, (-gumbel(search.seeds, ahead, V, stream=RESIDUAL, dtype=torch.float64)).exp()


@dataclass(frozen=True)
class Paper(FromLogits):
    """The paper's ways; `sigmoid` is lossy."""

    scale: tuple[float, float] | None = None

    def judge(self, target, draft, tokens, search):
        coins, races = given(search, tokens)
        full = torch.full_like(search.positions, tokens.shape[1])

        def verify(race):
            if self.scale is None:
                return paper.paper_exact(target, draft, tokens, full, coins, race)
            return paper.sigmoid_lossy(target, draft, tokens, full, coins, race, self.scale)

        _, accepted = verify(races[:, 0])  # where it stops decides whose race is run
        return verify(races[torch.arange(len(tokens)), accepted])


def test_paper_exact_is_exact():
    texts = run(Paper(CHAIN, Shape(), V), Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) > SOUND
    same = texts == run(FromLogits(CHAIN, Shape(), V), Shape(), HOT, ROWS, TOKENS)
    assert same.all(1).float().mean() > 0.999  # fp32 against fp64


# The twins: ways that do not have the target's distribution.


@pytest.mark.parametrize("scale", [paper.SPEECH, paper.TEXT, (-10.0, 10.0)], ids=str)
def test_twin_sigmoid_is_lossy(scale):
    texts = run(Paper(CHAIN, Shape(), V, scale=scale), Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND


@pytest.mark.parametrize("streams", [(DRAFT, RESIDUAL), (ACCEPT, DRAFT), (ACCEPT, ACCEPT)], ids=str)
def test_twin_shared_streams(streams):
    texts = run(FromLogits(CHAIN, Shape(), V, streams=streams), Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND
