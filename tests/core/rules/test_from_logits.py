"""Verification from logits: the rules' own choices, the target's distribution; unsound ways are seen not to have it."""

from dataclasses import dataclass

import pytest
import torch

import redrafter.kernels
from redrafter import RuleConfig, SamplingParams, Shape
from redrafter.bench import paper_kernels
from redrafter.core.accept import Accepted
from redrafter.core.noise import ACCEPT, DRAFT, RESIDUAL, gumbel, uniform
from redrafter.core.rules.rejection import RejectionRule, accept_chain, accept_rejection, rejection_from_logits
from redrafter.core.sampling import Sampling, floor, restrict
from redrafter.kernels import verify as operators
from redrafter.kernels.verify.naive import NEAR
from tests.helpers.tables import V, chi_square, joint, run

ROWS, TOKENS = 20_000, 4
SOUND, UNSOUND = 1e-3, 1e-9
HOT = SamplingParams(temperature=1.0)
COOL = SamplingParams(temperature=0.7, top_k=3)
CHAIN = RuleConfig(name="rejection", branching=(1, 1, 1))


def parts_of(search):
    return {"temperature": search.sampling.temperature, "seeds": search.seeds, "positions": search.positions}


@dataclass(frozen=True)
class Streams(RejectionRule):
    """Other random numbers."""

    streams: tuple[int, int] = (ACCEPT, RESIDUAL)

    def accept(self, search, tree, logits, counts):
        return accept_chain(
            logits, tree, floor=floor(logits, search.sampling), streams=self.streams, **parts_of(search)
        )


@dataclass(frozen=True)
class Recursive(RejectionRule):
    """The chain as the tree that it also is."""

    def accept(self, search, tree, logits, counts):
        scores, draft = restrict(logits, search.sampling), restrict(tree.draft_logits, search.sampling)
        return accept_rejection(scores, draft.log_softmax(-1), tree, branching=self.branching, **parts_of(search))


@pytest.mark.parametrize("params", [HOT, COOL, SamplingParams()], ids=["hot", "filtered", "greedy"])
def test_a_chain_chooses_what_a_tree_chooses(params):
    """Token for token, in fp64, where rounding flips nothing."""
    rows = 2_000
    want = run(Recursive(CHAIN, Shape(), V), Shape(), params, rows, 8)
    assert torch.equal(run(CHAIN, Shape(), params, rows, 8), want)


# The rules as on a GPU, with the kernels in place: there the distributions are tested; in Triton's interpreter, which
# takes a second for ten rows, that the kernels write what the oracle writes.

BIG = torch.cuda.is_available()
INTERPRETER = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:.*FP_FUSION.*")
"""numpy there warns of every overflow, and Triton of a default that will change."""
KINDS = {
    "chain": (RuleConfig(name="rejection", branching=(1, 1)), Shape(), "fused"),
    "tree": (RuleConfig(), Shape(width=2, length=2, nodes=3), "seeded"),
}


@pytest.fixture
def kernels(monkeypatch):
    """Turns them on, and counts how often each is called; the tables stay on the CPU."""
    kernel = pytest.importorskip(
        "redrafter.kernels.verify.triton", reason="triton is not installed", exc_type=ImportError
    )
    called = {"fused": 0, "seeded": 0}

    def there(x):
        if isinstance(x, tuple):
            return tuple(map(there, x))
        if not isinstance(x, torch.Tensor):
            return x
        x = x.float() if x.dtype == torch.float64 else x  # kernels take no fp64; floors are rounded as logits are
        return x.cuda() if BIG else x

    def turn_on():
        for name in called:
            real = getattr(operators, name)

            def counting(*args, operator=real, name=name):
                called[name] += 1
                found = operator(*map(there, args))
                return found.cpu() if isinstance(found, torch.Tensor) else tuple(x.cpu() for x in found)

            monkeypatch.setattr(operators, name, counting)
        monkeypatch.setattr(redrafter.kernels, "_forced", "triton")
        if not BIG:
            monkeypatch.setattr(kernel, "CHOICE", 16)
        return called

    return turn_on


@INTERPRETER
@pytest.mark.parametrize("params", [HOT, COOL], ids=["hot", "filtered"])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_by_the_kernels_write_what_they_write_by_the_oracle(kernels, kind, params):
    rule, shape, name = KINDS[kind]
    rows, tokens = (10_000, 4) if BIG else (16, 2)
    want = run(rule, shape, params, rows, tokens)
    called = kernels()
    got = run(rule, shape, params, rows, tokens)
    assert called[name] > 0
    assert (got == want).all(1).float().mean() > (0.999 if BIG else 0.99)


@pytest.mark.skipif(not BIG, reason="needs a GPU")
@pytest.mark.parametrize("params", [HOT, COOL], ids=["hot", "filtered"])
@pytest.mark.parametrize("kind", KINDS)
def test_distribution_by_the_kernels(kernels, kind, params):
    kernels()
    rule, shape, _ = KINDS[kind]
    assert chi_square(run(rule, shape, params, ROWS, TOKENS), joint(params, TOKENS)) > SOUND


@INTERPRETER
def test_twin_other_streams_by_the_kernel(kernels):
    """Another stream is another text; and where two are one, another distribution."""
    rule, shape, _ = KINDS["chain"]
    rows, tokens = (ROWS, TOKENS) if BIG else (8, 2)
    want = run(rule, shape, HOT, rows, tokens)
    kernels()
    got = run(Streams(rule, shape, V, (ACCEPT, ACCEPT)), shape, HOT, rows, tokens)
    assert not torch.equal(got, want)
    assert not BIG or chi_square(got, joint(HOT, TOKENS)) < UNSOUND


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
    assert torch.equal(target >= floor(target, sampling)[..., None], kept)
    rows = {"seeds": torch.arange(4), "positions": torch.arange(4), "counts": torch.full((4,), 3)}
    tokens = restrict(draft, sampling).argmax(-1)
    raw = rejection_from_logits(
        target, draft, tokens, temperature=sampling.temperature,
        floors=(floor(target, sampling), floor(draft, sampling)), **rows,
    )  # fmt: skip
    done = rejection_from_logits(
        restrict(target, sampling), restrict(draft, sampling), tokens, temperature=torch.ones(4), **rows
    )
    assert all(torch.equal(a, b) for a, b in zip(raw, done, strict=True))


def given(search, tokens):
    """The same random numbers for the paper's ways: coins, and the race at each place."""
    assert V <= NEAR  # all in one cell, where a token's place is the token itself
    gamma = tokens.shape[1]
    ahead = search.positions[:, None] + 1 + torch.arange(gamma + 1)
    coins = uniform(search.seeds, ahead[:, :gamma], 1, stream=ACCEPT, dtype=torch.float64)[..., 0]
    return coins, (-gumbel(search.seeds, ahead, V, stream=RESIDUAL, dtype=torch.float64)).exp()


@dataclass(frozen=True)
class Paper(RejectionRule):
    """The paper's ways; `sigmoid` is lossy."""

    scale: tuple[float, float] | None = None

    def accept(self, search, tree, logits, counts):
        target, draft = restrict(logits, search.sampling), restrict(tree.draft_logits, search.sampling)
        tokens = tree.tokens[:, 1:]
        coins, races = given(search, tokens)
        full = torch.full_like(search.positions, tokens.shape[1])

        def verify(race):
            if self.scale is None:
                return paper_kernels.paper_exact(target, draft, tokens, full, coins, race)
            return paper_kernels.sigmoid_lossy(target, draft, tokens, full, coins, race, self.scale)

        _, accepted = verify(races[:, 0])  # where it stops decides whose race is run
        new, accepted = verify(races[torch.arange(len(tokens)), accepted])
        path = torch.arange(tree.length + 1).expand_as(new)
        return Accepted(path, new, accepted + 1, accepted, tree.valid.sum(1) - 1)


def test_paper_exact_is_exact():
    texts = run(Paper(CHAIN, Shape(), V), Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) > SOUND
    same = texts == run(CHAIN, Shape(), HOT, ROWS, TOKENS)
    assert same.all(1).float().mean() > 0.999  # fp32 against fp64


# The twins: ways that do not have the target's distribution.


@pytest.mark.parametrize("scale", [paper_kernels.SPEECH, paper_kernels.TEXT, (-10.0, 10.0)], ids=str)
def test_twin_sigmoid_is_lossy(scale):
    texts = run(Paper(CHAIN, Shape(), V, scale=scale), Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND


@pytest.mark.parametrize("streams", [(DRAFT, RESIDUAL), (ACCEPT, DRAFT), (ACCEPT, ACCEPT)], ids=str)
def test_twin_shared_streams(streams):
    texts = run(Streams(CHAIN, Shape(), V, streams), Shape(), HOT, ROWS, TOKENS)
    assert chi_square(texts, joint(HOT, TOKENS)) < UNSOUND
