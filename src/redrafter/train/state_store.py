"""Where the target's hidden states of training texts are kept after the first pass: on disk, or in a GPU's memory."""

import gc
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from redrafter.drafters.training import TrainingBatch
from redrafter.errors import ConfigError
from redrafter.texts import Texts

log = logging.getLogger(__name__)

RESERVED = 0.3
"""Part of a GPU's memory that is left to training."""

Compute = Callable[[Tensor], Tensor]
"""Tokens (B, S) -> hidden states (B, S, C)."""


class StateStore(Protocol):
    """Gives hidden states of texts, and computes them only where it must."""

    def fetch(self, batch: TrainingBatch, rows: Sequence[int], compute: Compute) -> Tensor:
        """Hidden states (B, S, C) of a batch, whose texts are `rows`. Behind the end of a text, any finite values."""


class DiskStore:
    """All states in a folder of two files: states of all tokens, and which texts are in."""

    def __init__(self, folder: Path, texts: Texts, width: int, dtype: torch.dtype) -> None:
        self.starts, tokens = texts.starts, len(texts.tokens)
        need = tokens * width * dtype.itemsize
        states, marks = folder / "states.bin", folder / "done.bin"
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free + (states.stat().st_size if states.exists() else 0)
        log.info("hidden states of %d tokens take %.1f GB in %s", tokens, need / 1e9, folder)
        if free < need:
            raise ConfigError(
                f"caching hidden states needs {need / 1e9:.1f} GB in {folder} and {free / 1e9:.1f} GB are free: "
                "use --states recompute"
            )
        self.states = torch.from_file(str(states), shared=True, size=tokens * width, dtype=dtype).view(tokens, width)
        self.done = torch.from_file(str(marks), shared=True, size=len(texts), dtype=torch.uint8)

    def fetch(self, batch: TrainingBatch, rows: Sequence[int], compute: Compute) -> Tensor:
        spans = [(int(self.starts[row]), int(self.starts[row + 1])) for row in rows]
        if not bool(self.done[torch.as_tensor(rows)].all()):
            fresh = compute(batch.tokens).cpu()
            for place, (begin, end) in enumerate(spans):
                self.states[begin:end] = fresh[place, : end - begin]
            self.done[torch.as_tensor(rows)] = 1  # after the states: a killed run must not leave a mark without them
        whole = self.states.new_zeros(*batch.tokens.shape, self.states.shape[1])
        for place, (begin, end) in enumerate(spans):
            whole[place, : end - begin] = self.states[begin:end]
        return whole.to(batch.tokens.device)


class MemoryStore:
    """States of as many texts as fit into `room` bytes on a device; those of other texts are computed each time."""

    def __init__(self, texts: Texts, width: int, dtype: torch.dtype, device: torch.device, room: int) -> None:
        slots = min(len(texts.tokens), max(0, room) // (width * dtype.itemsize))
        self.lengths = texts.lengths
        self.states = torch.zeros(
            slots + 1, width, dtype=dtype, device=device
        )  # one more: what does not fit goes there
        self.begin = torch.full((len(texts),), -1)
        self.used = 0
        log.info("hidden states of %d of %d tokens stay in memory", slots, len(texts.tokens))

    def fetch(self, batch: TrainingBatch, rows: Sequence[int], compute: Compute) -> Tensor:
        chosen, device = torch.as_tensor(rows), batch.tokens.device
        missing = (self.begin[chosen] < 0).nonzero()[:, 0]
        stored = (self.begin[chosen] >= 0).nonzero()[:, 0]
        whole = self.states.new_empty(*batch.tokens.shape, self.states.shape[1])
        if len(stored):
            known = chosen[stored]
            slots = self._slots(known, self.begin[known], batch.tokens.shape[1])
            whole[stored.to(device)] = self.states[slots.to(device)]
        if len(missing):
            fresh = compute(batch.tokens[missing.to(device)])
            whole[missing.to(device)] = fresh
            self._keep(chosen[missing], fresh)
        return whole

    def _keep(self, rows: Tensor, fresh: Tensor) -> None:
        """Store the states of texts while there is room."""
        ends = self.used + self.lengths[rows].cumsum(0)
        fits = ends < len(self.states)
        begin = torch.where(fits, ends - self.lengths[rows], -1)
        self.states[self._slots(rows, begin, fresh.shape[1]).to(fresh.device)] = fresh
        self.begin[rows] = begin  # after the states: too little memory must not leave a mark without them
        self.used = int(ends[fits].max()) if bool(fits.any()) else self.used

    def _slots(self, rows: Tensor, begin: Tensor, width: int) -> Tensor:
        """(R, S) the slot of each token; the last slot, which no text owns, for padding and for texts not stored."""
        place = torch.arange(width)
        real = (place < self.lengths[rows][:, None]) & (begin >= 0)[:, None]
        return torch.where(real, begin[:, None] + place, len(self.states) - 1)


def gpu_room(device: torch.device) -> int:
    """Bytes of a GPU's memory that hidden states may take."""
    gc.collect()  # batches that wrote the data
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - RESERVED * total)
