"""Runs steps one after another, reading what each one decided before the next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.noise import as_int64
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Rule, Search
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter, Rows, settle, step
from redrafter.core.tree import Tree, root_tree
from redrafter.targets import Target

GROWTH = 256
"""Cache slots for new tokens to begin with: few texts are as long as they may become."""


@dataclass(frozen=True)
class Start:
    """A row to begin: its prompt, seed, budget of new tokens and ending tokens."""

    prompt: Sequence[int]
    seed: int
    budget: int
    eos: Sequence[int]


@dataclass(frozen=True)
class Gain:
    """What one step gave the rows, on the host."""

    tokens: list[list[int]]  # per row, may be empty
    drafted: list[int]  # of these tokens, from the first on, how many the drafter guessed
    done: list[bool]
    nodes: list[int]  # verified nodes that stood for a guess


class Reads(Protocol):
    """Who can read prompts into a cache: see Target.prefill."""

    def prefill(
        self, tokens: Tensor, lengths: list[int], cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]: ...


class EagerRun:
    """A batch from prompt to end. Rows that are done stay until `keep` drops them."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: Rule,
        sampling: Sampling,
        starts: Sequence[Start],
        cache: KVCache | None = None,
    ) -> None:
        self.target, self.rule, self.sampling = target, rule, sampling
        self.drafter = _Trimming(drafter)
        self.longest = [len(s.prompt) for s in starts]  # tokens in the cache of each row, plus at most one
        slack = rule.nodes + 1
        self.most = max(len(s.prompt) + s.budget for s in starts) + slack
        if cache is not None:
            self.most = cache.slots
        self.cache = cache or KVCache(slots=min(self.most, max(self.longest) + GROWTH + slack))
        device = target.device
        eos_width = max([1, *(len(s.eos) for s in starts)])
        eos = [list(s.eos) + [-1] * (eos_width - len(s.eos)) for s in starts]
        self.prompt = _pad_right([s.prompt for s in starts], device)  # (B, P)
        lengths = torch.tensor(self.longest, device=device)
        counts = None
        if sampling.penalises:
            real = torch.arange(self.prompt.shape[1], device=device) < lengths[:, None]
            counts = torch.zeros(len(starts), target.vocab_size, device=device)
            counts.scatter_add_(1, self.prompt, real.float())
        self.rows = Rows(
            lengths=lengths - 1,
            last=self.prompt.gather(1, lengths[:, None] - 1)[:, 0],
            seeds=torch.tensor([as_int64(s.seed) for s in starts], device=device),
            remaining=torch.tensor([s.budget for s in starts], device=device),
            done=torch.zeros(len(starts), dtype=torch.bool, device=device),
            eos=torch.tensor(eos, device=device),
            counts=counts,
            state=None,
        )

    @torch.no_grad()
    def prefill(self, reader: Reads | None = None) -> Gain:
        """Read the prompts; the pass over a prompt's last token already chooses the first new one."""
        lengths = self.longest
        logits, hidden = (reader or self.target).prefill(self.prompt, lengths, self.cache, self.drafter.layers)
        state = self.drafter.begin(self.prompt, self.rows.lengths + 1, hidden, self.most)
        rows = replace(self.rows, state=state)
        self.rows, accepted = first_tokens(rows, self.cache, self.sampling, self.rule, self.drafter, logits, hidden)
        return self._read(accepted)

    @torch.no_grad()
    def step(self) -> Gain:
        in_use = max(self.longest) + self.rule.nodes + 1
        if in_use > self.cache.slots:
            self.cache.reserve(min(self.most, 2 * self.cache.slots))
        self.cache.extent = in_use
        self.rows, accepted = step(self.rows, self.cache, self.sampling, self.rule, self.drafter, self.target)
        return self._read(accepted)

    def stop(self, row: int) -> None:
        """End a row from outside (a stop string, a cancelled request)."""
        self.rows.done[row] = True

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these, so that finished ones cost nothing."""
        index = torch.tensor(rows, device=self.target.device)
        self.cache.keep(index)
        self.sampling = keep_rows(self.sampling, index)
        self.longest = [self.longest[r] for r in rows]
        state = self.drafter.keep(self.rows.state, index)
        self.rows = replace(keep_rows(self.rows, index), state=state)

    def close(self) -> None:
        """Nothing to give back."""

    def _read(self, accepted: Accepted) -> Gain:
        counts = accepted.count.tolist()
        tokens = [row[:n] for row, n in zip(accepted.tokens.tolist(), counts, strict=True)]
        self.longest = [old + n for old, n in zip(self.longest, counts, strict=True)]
        drafted = [min(n, d) for n, d in zip(counts, accepted.drafted.tolist(), strict=True)]
        return Gain(tokens, drafted, self.rows.done.tolist(), accepted.nodes.tolist())


def first_tokens(
    rows: Rows, cache: KVCache, sampling: Sampling, rule: Rule, drafter: Drafter, logits: Tensor, hidden: Tensor
) -> tuple[Rows, Accepted]:
    """The second half of a step, with an empty tree: what the pass over whole prompts chose.

    `logits` (B, V) after each row's end, hidden states (B, P, C); `rows.lengths` are where the last tokens stand.
    """
    search = rule.search(sampling, rows.seeds, rows.lengths)
    accepted = rule.accept(search, root_tree(rows.last), logits[:, None], rows.counts)
    at_end = hidden.gather(1, rows.lengths[:, None, None].expand(-1, 1, hidden.shape[2]))
    return settle(rows, cache, drafter, accepted, at_end)


class _Trimming:
    """The drafter as an eager step sees it: guesses without empty nodes."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.layers, self.default_shape = drafter.layers, drafter.default_shape

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:
        return trimmed(self.drafter.draft(state, last, search))

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return self.drafter.begin(tokens, lengths, hidden, slots)

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        return self.drafter.advance(state, accepted, hidden)

    def keep(self, state: Any, rows: Tensor) -> Any:
        return self.drafter.keep(state, rows)


def trimmed(tree: Tree) -> Tree:
    """Without the columns that are empty in every row: a CPU pays for each."""
    n = int(tree.valid.sum(1).max())
    return replace(
        tree,
        tokens=tree.tokens[:, :n],
        parents=tree.parents[:, :n],
        depths=tree.depths[:, :n],
        valid=tree.valid[:, :n],
        mask=tree.mask[:, :n, :n],
    )


def _pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token 0 fills; it is never seen, whatever token 0 may be."""
    width = max(len(r) for r in rows)
    return torch.tensor([list(r) + [0] * (width - len(r)) for r in rows], device=device)
