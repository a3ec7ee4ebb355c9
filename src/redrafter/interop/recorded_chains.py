"""The drafting of chains as CUDA graphs, one for each recorded number of requests."""

import logging
from collections.abc import Callable, Sequence

import torch

from redrafter.drafters.recurrent.chain import ChainDrafter, ChainInputs, ChainOutputs
from redrafter.runtime.graph import Replays, recorded

log = logging.getLogger(__name__)

Record = Callable[[Sequence[Callable[[], None]]], list[Replays]]


def on_gpu(actions: Sequence[Callable[[], None]]) -> list[Replays]:
    """Graphs that share their working memory: no two of them run at once."""
    return recorded(actions, torch.cuda.graph_pool_handle())


class RecordedChains:
    """`ChainDrafter.compute`, replayed where it was recorded; other batches run eagerly."""

    def __init__(self, chains: ChainDrafter, batches: Sequence[int], record: Record = on_gpu) -> None:
        self.chains = chains
        chains.pads = True
        self.inputs: dict[int, ChainInputs] = {}
        self.outputs: dict[int, ChainOutputs] = {}
        self.graphs: dict[int, Replays] = {}
        with torch.no_grad():
            self._record(sorted(batches, reverse=True), record)  # the largest needs most memory

    def _record(self, batches: Sequence[int], record: Record) -> None:
        """A GPU that cannot record drafts eagerly."""

        def compute(batch: int) -> None:
            self.outputs[batch] = self.chains.compute(self.inputs[batch])

        try:
            self.inputs = {batch: self.chains.blank_inputs(batch) for batch in batches}
            actions = [lambda batch=batch: compute(batch) for batch in batches]
            self.graphs = dict(zip(batches, record(actions), strict=True))
        except RuntimeError as error:
            log.warning("redrafter: drafting is not recorded and runs eagerly: %s", error)

    def __call__(self, given: ChainInputs) -> ChainOutputs:
        rows, places = given.numbers.shape
        batch = min((b for b in self.graphs if b >= rows), default=0)
        if batch == 0:
            return self.chains.compute(given)
        mine = self.inputs[batch]
        mine.numbers[:rows, :places].copy_(given.numbers)  # a text may be shorter than its place
        mine.hidden[:rows].copy_(given.hidden)
        mine.hits[:rows].copy_(given.hits)
        if mine.memory is not None and given.memory is not None:
            mine.memory[:rows].copy_(given.memory)
        self.graphs[batch].replay()
        found = self.outputs[batch]  # the next replay writes there
        memory = None if found.memory is None else found.memory[:rows].clone()
        return ChainOutputs(memory, found.numbers[:rows])
