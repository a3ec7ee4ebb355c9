"""The drafting of chains as CUDA graphs, one for each recorded number of requests."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from redrafter.drafters.recurrent.chain import COLUMNS, ChainDrafter, inputs_of, picked
from redrafter.runtime.graph import Replays, recorded

log = logging.getLogger(__name__)

Record = Callable[[Sequence[Callable[[], None]]], list[Replays]]


def on_gpu(actions: Sequence[Callable[[], None]]) -> list[Replays]:
    """Graphs that share their working memory: no two of them run at once."""
    return recorded(actions, torch.cuda.graph_pool_handle())


class RecordedChains:
    """`ChainDrafter.follow_eagerly`, replayed where it was recorded; other batches run eagerly."""

    def __init__(self, chains: ChainDrafter, batches: Sequence[int], record: Record = on_gpu) -> None:
        self.chains = chains
        self.tables: dict[int, Tensor] = {}  # what each graph reads: (batch, columns)
        self.hidden: dict[int, Tensor] = {}  # (batch, P, C)
        self.guesses: dict[int, Tensor] = {}  # what it writes: (batch, L)
        self.graphs: dict[tuple[int, bool], Replays] = {}  # of a batch, with and without drafting
        with torch.no_grad():
            self._record(sorted(batches, reverse=True), record)  # the largest needs most memory

    def _record(self, batches: Sequence[int], record: Record) -> None:
        """A GPU that cannot record drafts eagerly."""
        slots = self.chains.slots
        size, dtype = slots.drafter.net.config.context_size, slots.drafter.target.dtype

        def follow(batch: int, draft: bool) -> None:
            given = inputs_of(self.tables[batch], self.hidden[batch])
            if draft:
                self.guesses[batch] = slots.step(given)
            else:
                slots.remember(given)

        try:
            for batch in batches:
                table = self.tables[batch] = torch.zeros_like(self.chains.table[:batch], device=slots.device)
                table[:, 0] = slots.spare
                self.hidden[batch] = torch.zeros(batch, slots.pairs, size, dtype=dtype, device=slots.device)
            kinds = [(batch, draft) for batch in batches for draft in (True, False)]
            self.graphs = dict(zip(kinds, record([partial(follow, *kind) for kind in kinds]), strict=True))
        except RuntimeError as error:
            log.warning("redrafter: drafting is not recorded and runs eagerly: %s", error)

    def __call__(self, rows: int, hidden: Tensor, draft: bool) -> Tensor | None:
        batch = min((b for b, _ in self.graphs if b >= rows), default=0)
        if batch == 0:
            return self.chains.follow_eagerly(rows, hidden, draft)
        self.chains.rows[rows:batch, 0] = self.chains.slots.spare  # these rows would write to a request's slot
        table = self.tables[batch]
        table.copy_(self.chains.table[:batch], non_blocking=True)
        first, count = table[:, COLUMNS - 1].long(), table[:, 1].long()
        self.hidden[batch].copy_(picked(hidden, first, count, self.chains.slots.pairs))
        self.graphs[batch, draft].replay()
        return self.guesses[batch][:rows] if draft else None
