"""The target's hidden states of training texts: recomputed for each update, or kept after the first time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.drafters.training import TrainingBatch
from redrafter.errors import ConfigError
from redrafter.memory import free_bytes
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.local_rollouts import rollout_visibility
from redrafter.train.objective import States
from redrafter.train.state_store import DiskStore, MemoryStore, StateStore, gpu_room

CPU_ROOM = 2**30
"""Bytes for hidden states in a CPU's memory, at most."""


class StateSource:
    """Gives the states of a batch. With a `store`, a text passes through the target only once."""

    def __init__(self, target: Target, layers: tuple[int, ...], store: StateStore | None = None) -> None:
        self.target, self.layers, self.store = target, layers, store
        self.read = read_layers(layers)

    @torch.no_grad()
    def fetch(self, batch: TrainingBatch, rows: Sequence[int]) -> States:
        """`rows` are the texts of the batch (which is on the target's device)."""
        whole = self._compute(batch.tokens) if self.store is None else self.store.fetch(batch, rows, self._compute)
        width = self.target.hidden_size
        context, last = whole[..., : width * len(self.layers)], whole[..., -width:]
        return States(context, last, None if batch.rollouts is None else self._rollouts(batch))

    def free_memory(self) -> bool:
        """Give up states that are kept in memory; return whether there were any."""
        if not isinstance(self.store, MemoryStore):
            return False
        self.store = None
        return True

    def _compute(self, tokens: Tensor) -> Tensor:
        return self.target.states(tokens, self.read)

    def _rollouts(self, batch: TrainingBatch) -> Tensor:
        """(n, T-1, H) last hidden states after each rollout token that something follows."""
        assert batch.rollouts is not None
        rows, width = batch.tokens.shape
        depth = batch.rollouts.shape[1]
        cache = KVCache(slots=width * depth)
        place = torch.arange(width, device=batch.tokens.device)
        tokens, found = batch.tokens, []
        for ahead in range(depth):
            slot = torch.arange((ahead + 1) * width, device=tokens.device)
            _, hidden = self.target.forward(
                tokens,
                (place + ahead).expand(rows, -1),
                (place + ahead * width).expand(rows, -1),
                rollout_visibility(place, ahead, width).expand(rows, -1, -1),
                (slot % width + slot // width).expand(rows, -1),
                cache,
                (-1,),
                keep=place[:1],
            )
            found.append(hidden[batch.row, batch.at])
            tokens = torch.zeros_like(tokens).index_put((batch.row, batch.at), batch.rollouts[:, ahead])
        return torch.stack(found[1:], 1)


def read_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers that training reads: the drafter's and the last one, which the target's choice comes from."""
    return layers if layers[-1] == -1 else (*layers, -1)


def open_states(
    kind: str | None, target: Target, layers: tuple[int, ...], texts: Texts, folder: Path, hurries: bool = False
) -> StateSource:
    """A source with the store that `--states` names; `folder` is for `cache`.

    hurries: where no store is named, a CPU too keeps states in memory. A run that is resumed then differs in last bits.
    """
    on_gpu = target.device.type == "cuda"
    width = target.hidden_size * len(read_layers(layers))
    store: StateStore | None = None
    if kind == "cache":
        store = DiskStore(folder, texts, width, target.dtype)
    elif kind == "memory" or (kind is None and on_gpu):
        if not on_gpu:
            raise ConfigError("--states memory needs a GPU: use --states cache, which keeps hidden states on disk")
        store = MemoryStore(texts, width, target.dtype, target.device, gpu_room(target.device))
    elif kind is None and hurries:
        store = MemoryStore(
            texts, width, target.dtype, target.device, int(min(CPU_ROOM, free_bytes(target.device) / 4))
        )
    return StateSource(target, layers, store)
