"""One kind of step over fixed buffers, in parts: draft, pack, then the pass of `flat_pass`, then settle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece, budgeted, promised, ranks
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Rows, settle
from redrafter.core.tree import Tree, ancestors, within
from redrafter.kernels.tree_attention.naive import DEEPEST
from redrafter.runtime.graph import Replays, recorded, unrecorded
from redrafter.runtime.guide import Branches, RowProcessors, columns, forbidden
from redrafter.runtime.result_line import encoded, new_tokens
from redrafter.runtime.state import assign
from redrafter.runtime.step_drafter import StepDrafter


@dataclass(frozen=True)
class StepKind:
    """Steps that share their recording. All stand at the first `rows` places."""

    rows: int
    shape: Shape | None  # None: nothing is drafted
    follows: bool  # the drafter takes in the new tokens
    samples: bool
    filters: bool
    penalises: bool
    guided: bool  # the host changes trees and logits, or wants the logits
    planned: bool = False  # the host chooses the nodes of all rows together, from what earlier steps promised


class StepPass(Protocol):
    """How the nodes of trees get their logits in recorded steps: `flat_pass` has the two ways."""

    @property
    def actions(self) -> Sequence[Callable[[], None]]:
        """What is recorded with the step."""

    def record(self, graphs: Sequence[Replays], trees: int | None) -> None:
        """Record the pass over so many lines of trees alone; `graphs` are those of the step, its end last."""

    def size(self, trees: int | None, pieces: Sequence[Piece]) -> int:
        """Tokens of the pass over so many lines of trees, by default all, and over pieces of prompts."""

    def ready(self, trees: int | None, pieces: Sequence[Piece]) -> bool:
        """Whether that pass was recorded."""

    def prepare(self, trees: int | None, pieces: Sequence[Piece]) -> None:
        """Record that pass, if it was not. What was packed is lost."""

    def run(self, trees: int | None, pieces: Sequence[Piece]) -> None:
        """Launch the pass over what was packed and over pieces of prompts, recorded at its first use."""

    def pack(self, tree: Tree, rows: Rows) -> Tensor:
        """Place the trees' valid nodes in the next pass, but of no row that is done -> where results will be."""

    def results(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, N+1, V) and hidden states (B, N+1, C) of the nodes, behind the pass."""


@dataclass
class Parts:
    """What all parts of a step work on, and what they leave for each other."""

    rows: Rows
    cache: KVCache
    sampling: Sampling
    rule: Rule
    drafter: StepDrafter
    passes: StepPass
    pooled: Tensor | None  # () drafted nodes of all rows together; None: each row has its own budget
    budgets: Tensor | None = None  # (K,) what the host may choose for it; the promises for each are told


def drafted(parts: Parts) -> tuple[Tree, Tensor | None]:
    """The draft of a step: the trees with the nodes to verify, and what each budget promises (B, K).

    Of rows that are done only the root is verified.
    """
    search = parts.rule.search(parts.sampling, parts.rows.seeds, parts.rows.lengths)
    tree = parts.drafter.draft(parts.rows.state, parts.rows.last, search)
    tree = within(tree, torch.where(parts.rows.done, 0, tree.length))
    if tree.scores is None or (parts.pooled is None and parts.budgets is None):
        return tree, None
    place = ranks(tree, tree.scores)
    promises = None if parts.budgets is None else promised(tree, tree.scores, place, parts.budgets)
    if parts.pooled is not None:
        tree = replace(tree, valid=budgeted(tree, place, parts.pooled))
    return tree, promises


def settled(parts: Parts, tree: Tree, at: Tensor, sampling: Sampling, promises: Tensor | None) -> Tensor:
    """The end of a step in place -> the result lines (B, ...)."""
    rows = parts.rows
    logits, hidden = parts.passes.results(at)
    search = parts.rule.search(sampling, rows.seeds, rows.lengths)
    accepted = parts.rule.accept(search, tree, logits, rows.counts)
    # Rows that are done may be read meanwhile: nothing moves in their caches.
    place = torch.arange(accepted.path.shape[1], device=accepted.path.device)
    accepted = replace(accepted, path=torch.where(rows.done[:, None], place, accepted.path))
    new, accepted = settle(rows, parts.cache, parts.drafter, accepted, hidden)
    lines = encoded(accepted, new.done, tree, promises)
    assign(rows, new)
    return lines


class RecordedStep:
    """A step that needs nothing of the host between its parts, but for the pass."""

    tree: Tree
    promises: Tensor | None
    at: Tensor
    lines: Tensor  # (B, ...) the results
    logits: Tensor | None = None
    version = -1  # of the sampling that `parts` holds
    budget: int | None = None  # that `parts` holds, if the host chose one
    graphs: Sequence[Any] = ()
    hosts: dict[int, list[Tensor]]
    turn = 0

    def __init__(self, parts: Parts, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.parts = parts
        self.drafted, self.settled = compiled(drafted), compiled(settled)
        self.hosts = {}

    @property
    def actions(self) -> list[Callable[[], None]]:  # not an attribute: a circle would hold memory
        """What is recorded, one graph each: what comes before the pass, then what comes after."""
        return [self.draft, *self.parts.passes.actions, self.settle]

    @property
    def width(self) -> int:
        """New tokens in a line of the results."""
        return new_tokens(self.lines, self.tree, self.promised)

    @property
    def promised(self) -> int:
        """Budgets that a line tells the promises of."""
        return 0 if self.promises is None else self.promises.shape[1]

    def use(self, sampling: Sampling, version: int) -> None:
        """Sample by these settings; `version` tells them apart."""
        if self.version != version:
            assign(self.parts.sampling, sampling)
            self.version = version

    def limit(self, budget: int | None) -> None:
        """The drafted nodes that all rows share in the next steps, if they share any. The device is not waited for."""
        if budget is not None and self.parts.pooled is not None and budget != self.budget:
            self.parts.pooled.fill_(budget)
            self.budget = budget

    def used(self, budget: int | None) -> int | None:
        """Lines of trees in a pass with this budget; None: as many as there may be."""
        shares = budget is not None and self.parts.pooled is not None
        return len(self.parts.rows.last) + int(budget or 0) if shares else None

    def tokens(self, budget: int | None, pieces: Sequence[Piece]) -> int:
        """Of the pass with this budget and these pieces of prompts, with padding."""
        return self.parts.passes.size(self.used(budget), pieces)

    def ready(self, budget: int | None, pieces: Sequence[Piece] = ()) -> bool:
        """Whether that pass was recorded."""
        return self.parts.passes.ready(self.used(budget), pieces)

    def prepare(self, budget: int | None, pieces: Sequence[Piece]) -> None:
        """Record that pass, if it was not: before the draft, and not within the time of the step."""
        self.parts.passes.prepare(self.used(budget), pieces)

    def record(self, memory: Any) -> None:
        """Record all parts, and the pass over trees alone, where a pass that fails is noticed."""
        on_gpu = self.parts.rows.last.is_cuda
        self.graphs = recorded(self.actions, memory) if on_gpu else unrecorded(self.actions)
        self.parts.passes.record(self.graphs, self.used(self.budget))

    def host(self, count: int) -> Tensor:
        """Host memory for the results of `count` steps. Two launches may be under way: each has memory of its own."""
        if count not in self.hosts:
            shape, on_gpu = (count, *self.lines.shape), self.lines.is_cuda
            self.hosts[count] = [torch.empty(shape, dtype=torch.long, pin_memory=on_gpu) for _ in range(2)]
        self.turn = 1 - self.turn
        return self.hosts[count][self.turn]

    def draft(self) -> None:
        self.tree, self.promises = self.drafted(self.parts)
        self.at = self.parts.passes.pack(self.tree, self.parts.rows)

    def settle(self) -> None:
        self.lines = self.settled(self.parts, self.tree, self.at, self.parts.sampling, self.promises)

    def before(self, processors: RowProcessors | None, guesses: Sequence[bool]) -> None:  # noqa: ARG002
        """Launch what comes before the pass."""
        self.graphs[0].replay()

    def after(self, between: Callable[[], None]) -> None:
        """Launch what comes after the pass; `between` launches what has to come first."""
        between()
        self.graphs[-1].replay()


class Exchange:
    """A tensor of the device, and memory of the host to fill it from."""

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self.on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=on_device.is_cuda)

    def send(self) -> None:
        self.on_device.copy_(self.on_host, non_blocking=True)


class GuidedStep(RecordedStep):
    """A step of rows with guides or with log-probabilities: draft, pack, pass, settle.

    After the draft the host changes the trees, for which the GPU waits. While the target verifies, the host computes
    which tokens may follow each node; only the end of the step needs them.
    """

    drafts: Tree
    guesses: Tensor  # (4, B, N+1) of the draft: tokens, parents, depths, valid
    nodes: Exchange | None = None  # as `guesses`, of the trees to verify; made by the first draft
    words: Exchange | None = None  # (B, N+1, V/32) int32, a bit for each allowed token
    processors: RowProcessors | None = None

    def __init__(self, parts: Parts, compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__(parts, compiled)
        self.trees = [Branches([0], [0])] * len(parts.rows.last)

    @property
    def actions(self) -> list[Callable[[], None]]:
        return [self.draft, self.pack, *self.parts.passes.actions, self.settle]

    def draft(self) -> None:
        tree, self.promises = self.drafted(self.parts)
        self.drafts = tree
        self.guesses = torch.stack([tree.tokens, tree.parents, tree.depths, tree.valid.long()])
        if self.nodes is None:
            self.nodes = Exchange(self.guesses.clone())

    def pack(self) -> None:
        assert self.nodes is not None
        tokens, parents, depths, valid = self.nodes.on_device
        tree, length = self.drafts, self.drafts.length
        if tree.draft_logits is None:
            length = max(length, min(DEEPEST, tree.nodes))
        mask = ancestors(parents, length)
        fields = {"tokens": tokens, "parents": parents, "depths": depths, "valid": valid > 0, "mask": mask}
        self.tree = replace(tree, **fields, length=length, scores=None)
        self.at = self.parts.passes.pack(self.tree, self.parts.rows)

    def settle(self) -> None:
        self.logits, _ = self.parts.passes.results(self.at)
        if self.words is None:
            batch, n, vocab = self.logits.shape
            every = torch.full((batch, n, -(-vocab // 32)), -1, dtype=torch.int32, device=self.logits.device)
            self.words = Exchange(every)
        sampling = replace(self.parts.sampling, processor=self._masked)
        self.lines = self.settled(self.parts, self.tree, self.at, sampling, self.promises)

    def _masked(self, logits: Tensor, _: Tree) -> Tensor:
        assert self.words is not None
        return logits.masked_fill(forbidden(self.words.on_device, logits.shape[2]), -torch.inf)

    def before(self, processors: RowProcessors | None, guesses: Sequence[bool]) -> None:
        """Draft, and let the guides change what was drafted. A sampled tree stays: its rule needs every draw."""
        self.graphs[0].replay()
        assert self.nodes is not None
        self.processors = processors
        on_host = self.nodes.on_host.copy_(self.guesses)  # waits for the draft
        tokens, parents, _, valid = on_host.tolist()
        sizes = [sum(row) for row in valid]
        self.trees = [Branches(t[:n], p[:n]) for t, p, n in zip(tokens, parents, sizes, strict=True)]
        if self.drafts.draft_logits is None and processors is not None and self.drafts.nodes:
            size = self.drafts.nodes
            changed = processors.guessed(self.trees, size, guesses)
            on_host.copy_(torch.tensor(columns(changed, size + 1)))
            self.trees = changed
        self.nodes.send()
        self.graphs[1].replay()

    def after(self, between: Callable[[], None]) -> None:
        assert self.words is not None
        if self.processors is None:
            self.words.on_host.fill_(-1)
        else:
            self.processors.mask(self.trees, self.words.on_host.numpy())
        self.processors = None  # holds rows
        self.words.send()
        super().after(between)
