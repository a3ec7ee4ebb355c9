"""A target and a drafter that are tables, so that whole distributions can be enumerated."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter import RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Rule, Search, make_rule
from redrafter.core.sampling import Sampling, restrict
from redrafter.core.step import Drafter, Rows, step
from redrafter.core.tree import Tree

V = 4
_generator = torch.Generator().manual_seed(1)
P = torch.randn(V, V, V, generator=_generator, dtype=torch.float64) * 1.2  # logits after (token before, token)
Q = P + torch.randn(V, V, V, generator=_generator, dtype=torch.float64)  # a drafter that errs


class TableTarget:
    """Keeps its tokens in the KV cache, so that commits are tested along."""

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        batch, n = tree.tokens.shape
        slots = lengths[:, None] + torch.arange(n)
        keys, _ = cache.write(0, *[tree.tokens[:, None, :, None].double()] * 2, slots)
        stored = keys[:, 0, :, 0].long()
        before_root = stored.gather(1, lengths[:, None] - 1)
        parent = tree.tokens.gather(1, tree.parents)
        before = torch.where(tree.depths == 0, before_root, parent)
        return P[before, tree.tokens], torch.zeros(batch, n, 0)


@dataclass(frozen=True)
class Before:
    token: Tensor  # (B,) the token before the last


class TableDrafter:
    """Samples or searches Q. Remembers the last token itself, since `advance` brings only new ones."""

    layers: tuple[int, ...] = ()
    default_shape = Shape()

    def __init__(self, last: Tensor) -> None:
        self.last = last

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Before:
        return Before(tokens[:, -2])

    def draft(self, state: Before, last: Tensor, search: Search) -> Tree:
        def advance(before: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            return Q[before.gather(1, parents), tokens], tokens

        return search.tree(advance, state.token[:, None], last)

    def advance(self, state: Before, accepted: Accepted, hidden: Tensor) -> Before:
        whole = torch.cat([self.last[:, None], accepted.tokens], 1)
        before = whole.gather(1, (accepted.count - 1).clamp(min=0)[:, None])[:, 0]
        self.last = whole.gather(1, accepted.count[:, None])[:, 0]
        return Before(torch.where(accepted.count > 0, before, state.token))

    def keep(self, state: Before, rows: Tensor) -> Before:
        return keep_rows(state, rows)


def run(
    rule: Rule | RuleConfig,
    shape: Shape,
    params: SamplingParams,
    rows: int,
    tokens: int,
    drafter: Drafter | None = None,
    begun: Any = None,
) -> Tensor:
    """`rows` texts of `tokens` tokens after the start (0, 1), each row with its own seed; `begun`: drafter's state."""
    if isinstance(rule, RuleConfig):
        rule = make_rule(rule, shape, V, torch.float64)
    sampling = Sampling.of([params], V, "cpu")
    sampling = replace(
        sampling, **{k: v.expand(rows, *v.shape[1:]) for k, v in vars(sampling).items() if isinstance(v, Tensor)}
    )
    cache = KVCache(slots=2 + tokens + rule.nodes + 8)
    one = torch.ones(rows, dtype=torch.long)
    cache.write(0, *[torch.zeros(rows, 1, 1, 1, dtype=torch.float64)] * 2, 0 * one[:, None])
    drafter = drafter or TableDrafter(one)
    state = Rows(
        lengths=one,
        last=one,
        seeds=torch.arange(rows) * 7919 + 13,
        remaining=one * tokens,
        done=one == 0,
        eos=-one[:, None],
        counts=None,
        state=begun or Before(0 * one),
    )
    out = torch.zeros(rows, tokens + shape.length + 32, dtype=torch.long)
    written = 0 * one
    while not bool(state.done.all()):
        state, accepted, _ = step(state, cache, sampling, rule, drafter, TableTarget())
        place = written[:, None] + torch.arange(accepted.tokens.shape[1])
        new = torch.arange(accepted.tokens.shape[1]) < accepted.count[:, None]
        out.scatter_(1, place, torch.where(new, accepted.tokens, out.gather(1, place)))
        written = written + accepted.count
    return out[:, :tokens]


def joint(params: SamplingParams, tokens: int) -> Tensor:
    """Probability of each of the V**tokens texts, enumerated in fp64."""
    sampling = Sampling.of([params], V, "cpu")
    probability = restrict(P.view(1, V * V, V), sampling).softmax(-1).view(V, V, V)
    result = []
    for text in itertools.product(range(V), repeat=tokens):
        whole = (0, 1, *text)
        p = 1.0
        for i in range(tokens):
            p *= float(probability[whole[i], whole[i + 1], whole[i + 2]])
        result.append(p)
    return torch.tensor(result, dtype=torch.float64)


def chi_square(texts: Tensor, expected: Tensor) -> float:
    """p-value of the texts under the joint distribution; rare cells are pooled."""
    from scipy.stats import chisquare

    rows, tokens = texts.shape
    index = (texts * V ** torch.arange(tokens - 1, -1, -1)).sum(1)
    seen = torch.bincount(index, minlength=V**tokens).double()
    wanted = expected * rows
    impossible = wanted < 1e-9
    if float(seen[impossible].sum()) > 0:
        return 0.0
    rare = (wanted < 5) & ~impossible
    common = ~rare & ~impossible
    observed = torch.cat([seen[common], seen[rare].sum()[None]]) if bool(rare.any()) else seen[common]
    model = torch.cat([wanted[common], wanted[rare].sum()[None]]) if bool(rare.any()) else wanted[common]
    return float(chisquare(observed.numpy(), (model * observed.sum() / model.sum()).numpy()).pvalue)
