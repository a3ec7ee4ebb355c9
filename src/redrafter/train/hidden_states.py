"""The target's hidden states of training texts: recomputed for each update, or kept on disk after the first time."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.drafters.training import TrainingBatch
from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.local_rollouts import rollout_visibility
from redrafter.train.objective import States

log = logging.getLogger(__name__)


class StateSource:
    """Gives the states of a batch. With a `folder`, a text passes through the target only once."""

    def __init__(self, target: Target, layers: tuple[int, ...], texts: Texts, folder: Path | None = None) -> None:
        self.target, self.layers, self.texts = target, layers, texts
        self.read = layers if layers[-1] == -1 else (*layers, -1)
        self.store: Tensor | None = None
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        """Two files: states of all tokens, and which texts are in. Texts are marked after they are written."""
        tokens, width = len(self.texts.tokens), self.target.hidden_size * len(self.read)
        need = tokens * width * self.target.dtype.itemsize
        states, marks = folder / "states.bin", folder / "done.bin"
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free + (states.stat().st_size if states.exists() else 0)
        log.info("hidden states of %d tokens take %.1f GB in %s", tokens, need / 1e9, folder)
        if free < need:
            raise ConfigError(
                f"caching hidden states needs {need / 1e9:.1f} GB in {folder} and {free / 1e9:.1f} GB are free: "
                "use --states recompute"
            )
        dtype = self.target.dtype
        self.store = torch.from_file(str(states), shared=True, size=tokens * width, dtype=dtype).view(tokens, width)
        self.done = torch.from_file(str(marks), shared=True, size=len(self.texts), dtype=torch.uint8)

    @torch.no_grad()
    def fetch(self, batch: TrainingBatch, rows: Sequence[int]) -> States:
        """`rows` are the texts of the batch (which is on the target's device)."""
        stored = self.store is not None
        whole = self._through_store(batch, rows) if stored else self.target.states(batch.tokens, self.read)
        width = self.target.hidden_size
        context, last = whole[..., : width * len(self.layers)], whole[..., -width:]
        return States(context, last, None if batch.rollouts is None else self._rollouts(batch))

    def _through_store(self, batch: TrainingBatch, rows: Sequence[int]) -> Tensor:
        assert self.store is not None
        starts = self.texts.starts
        if not bool(self.done[torch.as_tensor(rows)].all()):
            fresh = self.target.states(batch.tokens, self.read).cpu()
            for place, row in enumerate(rows):
                begin, end = int(starts[row]), int(starts[row + 1])
                self.store[begin:end] = fresh[place, : end - begin]
                self.done[row] = 1
        whole = self.store.new_zeros(*batch.tokens.shape, self.store.shape[1])
        for place, row in enumerate(rows):
            begin, end = int(starts[row]), int(starts[row + 1])
            whole[place, : end - begin] = self.store[begin:end]
        return whole.to(batch.tokens.device)

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
