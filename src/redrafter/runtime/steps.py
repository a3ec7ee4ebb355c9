"""One step over fixed buffers: whole, or in parts with the host's work between them.

A step's result is one line of integers a row: count, drafted, done, nodes, then the new tokens, the accepted path, and
the tree's tokens and parents.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Rows, Target, settle, step
from redrafter.core.tree import Tree, ancestors, root_tree
from redrafter.drafters.step_drafter import StepDrafter
from redrafter.runtime.guide import DEEPEST, Branches, RowProcessors, columns, forbidden
from redrafter.runtime.state import assign


def run_step(
    rows: Rows, cache: KVCache, sampling: Sampling, rule: Rule, drafter: StepDrafter, target: Target
) -> tuple[Tensor, int]:
    """A step in place -> what the host wants to know (B, ...), and the width of the new tokens in it."""
    return told(rows, *step(rows, cache, sampling, rule, drafter, target))


def told(rows: Rows, new: Rows, accepted: Accepted, tree: Tree) -> tuple[Tensor, int]:
    """The end of a step in place; see `run_step`."""
    assign(rows, new)
    counts = torch.stack((accepted.count, accepted.drafted, new.done.long(), accepted.nodes), dim=1)
    out = torch.cat([counts, accepted.tokens, accepted.path, tree.tokens, tree.parents], dim=1)
    return out, accepted.tokens.shape[1]


class Step(Protocol):
    """`parts` are recorded, one graph each. `between` is the host's work after each part but the last."""

    @property
    def parts(self) -> Sequence[Callable[[], None]]: ...

    @property
    def between(self) -> Sequence[Callable[[], None]]: ...

    @property
    def result(self) -> tuple[Tensor, int]:
        """What `run_step` returned in the last step."""


class WholeStep:
    """A step that needs nothing of the host."""

    result: tuple[Tensor, int]
    between: Sequence[Callable[[], None]] = ()

    def __init__(self, action: Callable[[], tuple[Tensor, int]]) -> None:
        self.action = action

    @property
    def parts(self) -> list[Callable[[], None]]:  # not an attribute: a circle would hold memory
        return [self._run]

    def _run(self) -> None:
        self.result = self.action()


class Exchange:
    """A tensor of the device, and memory of the host to fill it from."""

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self.on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=on_device.is_cuda)

    def send(self) -> None:
        self.on_device.copy_(self.on_host, non_blocking=True)


class GuidedStep:
    """A step of rows with guides: draft, verify, choose.

    After the draft the host changes the trees, for which the GPU waits. While the target verifies, the host computes
    which tokens may follow each node; only the choice needs them. `processors` are those of the rows in the next step.
    """

    result: tuple[Tensor, int]
    drafted: Tree
    guesses: Tensor  # (4, B, N+1) of the draft: tokens, parents, depths, valid
    tree: Tree
    logits: Tensor
    hidden: Tensor

    def __init__(
        self, rows: Rows, cache: KVCache, sampling: Sampling, rule: Rule, drafter: StepDrafter, target: Target
    ) -> None:
        self.rows, self.cache, self.sampling, self.rule = rows, cache, sampling, rule
        self.drafter, self.target = drafter, target
        self.processors: RowProcessors | None = None
        self.nodes: Exchange | None = None  # as `guesses`, of the tree to verify; made by the first draft
        self.words: Exchange | None = None  # (B, N+1, V/32) int32, a bit for each allowed token
        self.trees = [Branches([0], [0])] * len(rows.last)  # without a draft the root's token is not needed

    @property
    def parts(self) -> list[Callable[[], None]]:
        return [*([self._draft] if self.drafter.guesses else []), self._verify, self._choose]

    @property
    def between(self) -> list[Callable[[], None]]:
        return [*([self._edit] if self.drafter.guesses else []), self._mask]

    def _draft(self) -> None:
        search = self.rule.search(self.sampling, self.rows.seeds, self.rows.lengths)
        self.drafted = tree = self.drafter.draft(self.rows.state, self.rows.last, search)
        self.guesses = torch.stack([tree.tokens, tree.parents, tree.depths, tree.valid.long()])
        if self.nodes is None:
            self.nodes = Exchange(self.guesses.clone())

    def _edit(self) -> None:
        """Let the guides change what was drafted. A sampled tree stays as it is: its rule needs every draw."""
        assert self.nodes is not None
        found = self.nodes.on_host.copy_(self.guesses)  # waits for the draft
        tokens, parents, _, valid = found.tolist()
        sizes = [sum(row) for row in valid]
        self.trees = [Branches(t[:n], p[:n]) for t, p, n in zip(tokens, parents, sizes, strict=True)]
        if self.drafted.draft_logits is None and self.processors is not None:
            size = self.drafted.nodes
            self.trees = self.processors.guessed(self.trees, size)
            self.nodes.on_host.copy_(torch.tensor(columns(self.trees, size + 1)))
        self.nodes.send()

    def _verify(self) -> None:
        if self.nodes is None:
            self.tree = root_tree(self.rows.last)
        else:
            tokens, parents, depths, valid = self.nodes.on_device
            drafted, length = self.drafted, self.drafted.length
            if drafted.draft_logits is None:
                length = max(length, min(DEEPEST, drafted.nodes))
            mask = ancestors(parents, length)
            self.tree = replace(
                drafted, tokens=tokens, parents=parents, depths=depths, valid=valid > 0, mask=mask, length=length
            )
        self.logits, self.hidden = self.target.verify(self.tree, self.rows.lengths, self.cache, self.drafter.layers)
        if self.words is None:
            batch, n, vocab = self.logits.shape
            every = torch.full((batch, n, -(-vocab // 32)), -1, dtype=torch.int32, device=self.logits.device)
            self.words = Exchange(every)

    def _mask(self) -> None:
        assert self.words is not None
        if self.processors is None:
            self.words.on_host.fill_(-1)
        else:
            self.processors.mask(self.trees, self.words.on_host.numpy())
        self.words.send()
        self.processors = None  # holds rows

    def _choose(self) -> None:
        rows, sampling = self.rows, replace(self.sampling, processor=self._masked)
        search = self.rule.search(sampling, rows.seeds, rows.lengths)
        accepted = self.rule.accept(search, self.tree, self.logits, rows.counts)
        self.result = told(rows, *settle(rows, self.cache, self.drafter, accepted, self.hidden), self.tree)

    def _masked(self, logits: Tensor, _: Tree) -> Tensor:
        assert self.words is not None
        return logits.masked_fill_(forbidden(self.words.on_device, logits.shape[2]), -torch.inf)
