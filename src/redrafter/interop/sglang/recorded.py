"""The drafting after a step as a CUDA graph, for each recorded batch size and size of tree."""

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter.interop.sglang.sampling import searching
from redrafter.interop.sglang.trees import Requests, TreeBatch
from redrafter.runtime.graph import recorded

log = logging.getLogger(__name__)

MOST_NOISE = 1 << 26
"""Numbers of noise in a recording of a sampled batch. All recordings share the memory of the largest."""
BATCHES = (1, 3, 16)
"""Batch sizes to warm up with. Triton compiles a kernel anew for 1, for multiples of 16 and for other numbers."""


@dataclass(frozen=True)
class Inputs:
    """Tensors that a recorded batch reads. Rows that are not used belong to the spare slot."""

    requests: Requests
    tokens: Tensor  # (B, D)
    count: Tensor  # (B,)
    hidden: Tensor  # (B, D, C)

    def fill(self, requests: Requests, tokens: Tensor, count: Tensor, hidden: Tensor, spare: int) -> None:
        rows, mine = len(count), self.requests
        if rows < len(mine.slots):
            mine.slots[rows:].fill_(spare)
        pairs = [
            (mine.slots, requests.slots),
            (mine.lengths, requests.lengths),
            (self.tokens[:, : tokens.shape[1]], tokens),
            (self.count, count),
            (self.hidden[:, : hidden.shape[1]], hidden),
            (mine.sampling.temperature, requests.sampling.temperature),
        ]
        if requests.sampling.samples:
            pairs.append((mine.seeds, requests.seeds))
        for own, given in pairs:
            own[:rows].copy_(given)
        if hidden.shape[1] < self.hidden.shape[1]:  # an earlier request's states may hold NaN, and 0 times NaN is NaN
            self.hidden[:rows, hidden.shape[1] :].zero_()

    def asked(self, samples: bool) -> Requests:
        """The requests of a batch in which all are greedy, or some sample."""
        return replace(self.requests, sampling=replace(self.requests.sampling, samples=samples))


class RecordedFollow:
    """`TreeBatch.follow`, replayed where it was recorded; other batches run eagerly."""

    def __init__(self, trees: TreeBatch, depth: int, context_size: int, dtype: torch.dtype) -> None:
        self.trees, self.depth, self.context_size, self.dtype = trees, depth, context_size, dtype
        self.inputs: dict[int, Inputs] = {}
        self.graphs: dict[tuple[int, int, bool], Any] = {}  # by batch size, size of tree and whether requests sample

    def record(self, batches: list[int], usable: Callable[[int], list[int]], sampled: bool) -> None:
        """Record every usable size of tree for these batch sizes: greedy batches, then sampled ones.

        What a GPU cannot record, for want of memory say, runs eagerly.
        """
        memory, largest_first = None, sorted(batches, reverse=True)
        self.inputs = {batch: self._made(batch) for batch in largest_first}
        kinds = [
            (batch, size, samples)
            for samples in ((False, True) if sampled else (False,))
            for batch in largest_first
            for size in usable(batch)
            if not samples or 0 < self.noise_numbers(batch, size) <= MOST_NOISE
        ]
        try:
            for batch, size, samples in kinds:
                follow = functools.partial(self._follow, self.inputs[batch], size, samples)
                (graph,) = recorded([follow], memory)
                self.graphs[batch, size, samples], memory = graph, graph.pool()  # type: ignore[attr-defined]
        except RuntimeError as error:
            counts = len(self.graphs), len(kinds)
            log.warning("redrafter: drafting is recorded for %d of %d batches, not for the others: %s", *counts, error)

    def _follow(self, given: Inputs, size: int, samples: bool) -> None:
        self.trees.follow(given.asked(samples), given.tokens, given.count, given.hidden, size)

    def noise_numbers(self, batch: int, size: int) -> int:
        """How many numbers of noise a sampled batch draws for its beam search."""
        shape = self.trees.shapes[size]
        return 0 if shape is None else batch * (shape.length + 1) * self.trees.vocab_size

    def warm_up(self, usable: Callable[[int], list[int]]) -> None:
        """Draft and accept once with every size of tree, so that no request waits while a kernel is compiled.

        Verification's choices run outside the recordings.
        """
        trees = self.trees
        for batch in BATCHES:
            if batch > trees.spare:  # more requests than SGLang runs at once: their logits may not fit into memory
                break
            given = self._made(batch)
            for size, samples in itertools.product(usable(batch), (False, True)):
                self._follow(given, size, samples)
                tree = trees.tree(given.requests.slots, size)
                logits = torch.zeros(*tree.tokens.shape, trees.vocab_size, device=trees.device)  # SGLang's are fp32
                trees.accept(given.asked(samples), size, tree, logits)

    def _made(self, batch: int) -> Inputs:
        device = self.trees.device
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        temperature = torch.zeros(batch, device=device)
        requests = Requests(zeros + self.trees.spare, zeros.clone(), zeros.clone(), searching(temperature, False))
        tokens = torch.zeros(batch, self.depth, dtype=torch.long, device=device)
        hidden = torch.zeros(batch, self.depth, self.context_size, dtype=self.dtype, device=device)
        return Inputs(requests, tokens, zeros + 1, hidden)

    def batch_for(self, rows: int, size: int, samples: bool) -> int:
        """The smallest recorded batch that so many requests fit in; 0: none."""
        return min((b for b, *kind in self.graphs if kind == [size, samples] and b >= rows), default=0)

    def __call__(self, requests: Requests, tokens: Tensor, count: Tensor, hidden: Tensor, size: int) -> None:
        samples = requests.sampling.samples and self.trees.shapes[size] is not None  # nothing drafted, no noise
        batch = self.batch_for(len(count), size, samples)
        if batch == 0:
            self.trees.follow(requests, tokens, count, hidden, size)
            return
        self.inputs[batch].fill(requests, tokens, count, hidden, self.trees.spare)
        self.graphs[batch, size, samples].replay()
