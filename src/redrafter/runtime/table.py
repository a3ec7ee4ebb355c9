"""The memory that rows of a running batch live in: one place each, fixed, in tensors that never move.

Steps run over neighbouring places, which are views of the same tensors. A row changes its place by swapping with
another.
"""

from typing import Any

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.rules import Rule, Search
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter, Rows, step
from redrafter.core.step import Target as Verifies
from redrafter.core.tree import Tree, root_tree
from redrafter.runtime.arena import Arena
from redrafter.runtime.eager import trimmed
from redrafter.runtime.program import leaves, rebuilt
from redrafter.targets import Target


class Table:
    """`places` rows of `slots` slots: keys and values, hidden states, and what `Rows` holds."""

    def __init__(self, target: Target, drafter: Drafter, places: int, slots: int, endings: int) -> None:
        device = target.device
        self.places, self.slots = places, slots
        self.cache = Arena(target, places, slots)
        none = torch.zeros(places, 1, dtype=torch.long, device=device)
        _, like = target.prefill(none[:1], [1], KVCache(slots=1), drafter.layers)
        # Where a token stands, the hidden state above it: a prompt that begins like another row needs them too.
        self.history = like.new_zeros(places, slots, like.shape[2])  # (places, S, C)
        every = torch.ones(places, dtype=torch.long, device=device)
        state = drafter.begin(none, every, self.history[:, :1], slots)
        self.rows = Rows(
            lengths=torch.zeros_like(every),
            last=torch.zeros_like(every),
            seeds=torch.zeros_like(every),
            remaining=torch.zeros_like(every),
            done=every > 0,
            eos=torch.full((places, endings), -1, device=device),
            counts=torch.zeros(places, target.vocab_size, device=device),
            state=rebuilt(state, [x.clone() for x in leaves(state)]),
        )

    def view(self, start: int, stop: int, *, drafts: bool, counted: bool) -> Rows:
        """Rows start..stop-1 themselves; without the drafter's state where nothing is drafted."""
        rows = self.rows
        state = rebuilt(rows.state, [x[start:stop] for x in leaves(rows.state)]) if drafts else None
        return Rows(
            lengths=rows.lengths[start:stop],
            last=rows.last[start:stop],
            seeds=rows.seeds[start:stop],
            remaining=rows.remaining[start:stop],
            done=rows.done[start:stop],
            eos=rows.eos[start:stop],
            counts=rows.counts[start:stop] if counted and rows.counts is not None else None,
            state=state,
        )

    def _stored(self) -> list[Tensor]:
        """Keys and values, (places, ..., S, D): all layers at once where they lie together."""
        whole = self.cache.whole
        return list(self.cache.tensors()) if whole is None else [whole.movedim(2, 0)]

    def swap(self, a: int, b: int, length: int) -> None:
        """Two rows change places; neither has more than `length` tokens."""
        if a == b:
            return
        for x in self._stored():
            _swap(x[..., :length, :], a, b)
        _swap(self.history[:, :length], a, b)
        for x in leaves(self.rows):
            _swap(x, a, b)

    def follow(self, drafter: Drafter, places: list[int], tokens: list[list[int]], begin: list[int]) -> None:
        """The drafter takes in tokens that rows have gained without it: as many of each, from index `begin` on."""
        device = self.history.device
        at, new, first = (torch.tensor(x, device=device) for x in (places, tokens, begin))
        slots = first[:, None] - 1 + torch.arange(new.shape[1], device=device)  # where the state that chose each stands
        every = torch.full_like(at, new.shape[1])
        none = torch.zeros_like(new)
        accepted = Accepted(none, new, every, drafted=none[:, 0], nodes=none[:, 0])
        mine = [x[at] for x in leaves(self.rows.state)]
        hidden = self.history[at[:, None], slots]
        state = drafter.advance(rebuilt(self.rows.state, list(mine)), accepted, hidden)
        for whole, value in zip(leaves(self.rows.state), leaves(state), strict=True):
            whole[at] = value

    def copy(self, source: int, place: int, start: int, stop: int) -> None:
        """Slots start..stop-1 of a row become another's too."""
        for x in self._stored():
            x[place, ..., start:stop, :] = x[source, ..., start:stop, :]
        self.history[place, start:stop] = self.history[source, start:stop]


def _swap(x: Tensor, a: int, b: int) -> None:
    kept = x[a].clone()
    x[a] = x[b]
    x[b] = kept


class Watched:
    """A drafter whose guesses are seen and whose hidden states are kept; it may be left behind and catch up."""

    def __init__(
        self, drafter: Drafter, rows: Rows, history: Tensor, *, guesses: bool, follows: bool, trims: bool
    ) -> None:
        self.drafter, self.guesses, self.follows, self.trims = drafter, guesses, follows, trims
        self.lengths, self.history = rows.lengths, history
        self.layers, self.default_shape = drafter.layers, drafter.default_shape
        self.widths = (1, 1)  # of accepted tokens and of the tree, in what a step tells
        self.tree: Tree | None = None

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return self.drafter.begin(tokens, lengths, hidden, slots)

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:
        tree = self.drafter.draft(state, last, search) if self.guesses else root_tree(last)
        self.tree = trimmed(tree) if self.trims else tree
        return self.tree

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        """Beyond `count` there is no meaning in what is written, and the next step writes there again."""
        if hidden.shape[2]:
            slots = self.lengths[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
            self.history.scatter_(1, slots[..., None].expand_as(hidden), hidden)
        return self.drafter.advance(state, accepted, hidden) if self.follows else state

    def keep(self, state: Any, rows: Tensor) -> Any:
        return self.drafter.keep(state, rows)


def store(rows: Any, new: Any) -> None:
    """What a step made of rows (or somebody else of a sampling) takes their place, tensor by tensor."""
    for old, value in zip(leaves(rows), leaves(new), strict=True):
        if old is not value:
            old.copy_(value)


def told_step(
    rows: Rows, out: Tensor, cache: KVCache, sampling: Sampling, rule: Rule, drafter: Watched, target: Verifies
) -> None:
    """A step in place; `out` tells count, drafted, done, nodes, then tokens, path, the tree's tokens and parents."""
    new, accepted = step(rows, cache, sampling, rule, drafter, target)
    store(rows, new)
    tree = drafter.tree
    assert tree is not None
    drafter.widths = (accepted.tokens.shape[1], tree.tokens.shape[1])
    counts = torch.stack((accepted.count, accepted.drafted, new.done.long(), accepted.nodes), dim=1)
    told = torch.cat([counts, accepted.tokens, accepted.path, tree.tokens, tree.parents], dim=1)
    out[:, : told.shape[1]] = told
