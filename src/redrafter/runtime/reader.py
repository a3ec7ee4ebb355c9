"""Reads prompts into a cache by recorded passes: to launch one kernel by kernel takes longer than it runs."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.runtime.graph import recorded
from redrafter.targets.cuda.tree_target import TreeTarget

log = logging.getLogger(__name__)

PIECES = (16, 32, 64, 128, 256, 512)
"""Tokens of a recorded pass; fewer are filled up with tokens that nobody sees."""


class Reader:
    """One pass for each number of tokens in `PIECES`, at any place of the cache, made at its first use and kept."""

    def __init__(self, verifier: TreeTarget, cache: KVCache, layers: tuple[int, ...]) -> None:
        self.verifier, self.cache, self.layers = verifier, cache, layers
        self.pieces: dict[int, _Piece] = {}
        # Its own: a recording that fails leaves its pool to nobody else.
        self.memory = torch.cuda.graph_pool_handle() if verifier.target.device.type == "cuda" else None
        self.hopeless = False

    def read(self, place: int, tokens: Sequence[int], begin: int) -> tuple[Tensor, Tensor] | None:
        """Tokens behind the first `begin` of a row -> logits (1, V) after the last, hidden states (1, n, C).

        They are there until the next recorded pass. None if it cannot be recorded or would not fit behind `begin`.
        """
        size = next((n for n in PIECES if n >= len(tokens)), None)
        if self.hopeless or size is None or begin + size > self.cache.slots:
            return None
        piece = self.pieces.get(size) or _Piece(size, self.verifier.target.device)
        piece.given.copy_(torch.tensor([*tokens, *[0] * (size - len(tokens)), begin, place, len(tokens) - 1]))
        try:
            piece.run(self)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model, the compiler, Triton or the recording
            self.hopeless = True
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("%s reads prompts by passes that are not recorded (%s)", self.verifier.target.name, first)
            return None
        self.pieces[size] = piece
        return piece.logits, piece.hidden[:, : len(tokens)]

    def prefill(
        self, tokens: Tensor, lengths: list[int], cache: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """As Target.prefill, of a single row."""
        ids: list[int] = tokens[0].tolist()
        hidden: list[Tensor] = []
        for start in range(0, len(ids), PIECES[-1]):
            found = self.read(0, ids[start : start + PIECES[-1]], start)
            if found is None:
                with self.verifier.using(cache):
                    logits, rest = self.verifier.prefill(tokens, lengths, cache, layers, begin=start)
                return logits, torch.cat([*hidden, rest], dim=1)
            logits = found[0]
            hidden.append(found[1].clone())  # the next piece takes its place
        return logits, torch.cat(hidden, dim=1)


class _Piece:
    """One recorded pass; `given` are its tokens, where they begin, the row's place, and which token is the last."""

    logits: Tensor
    hidden: Tensor

    def __init__(self, size: int, device: torch.device) -> None:
        self.given = torch.zeros(size + 3, dtype=torch.long, device=device)
        self.depths = torch.arange(size, device=device)[None]
        self.chain = self.depths[:, :, None] >= self.depths[:, None, :]
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, reader: Reader) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        with reader.verifier.using(reader.cache):
            if self.given.is_cuda:  # passes before the recording write what it will write again
                self.graph = recorded(lambda: self._pass(reader), reader.memory)
                self.graph.replay()
            else:
                self._pass(reader)

    def _pass(self, reader: Reader) -> None:
        begin, place, last = self.given[-3:].view(3, 1)
        tokens = self.given[None, :-3]
        logits, self.hidden = reader.verifier.forward(
            tokens, self.depths, self.chain, begin, reader.layers, place, keep=last
        )
        self.logits = logits[0]
