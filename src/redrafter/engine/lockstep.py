"""A batch of rows at different lengths, shown one position at a time as transformers' `generate` shows it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import StoppingCriteriaList


@runtime_checkable
class Streamer(Protocol):
    """The interface of transformers' `BaseStreamer`."""

    def put(self, value: Tensor) -> Any: ...
    def end(self) -> Any: ...


class LockstepBatch:
    """The rows of a batch as transformers' own loop shows them: every row one token longer at each position.

    redrafter's rows grow at different speeds. A position is shown to the streamer and to the user's
    stopping criteria, once and for the whole batch, as soon as every unfinished row has a token there.
    """

    def __init__(
        self, input_ids: Tensor, others: Sequence[Any], fill: int, *, pads: bool, streamer: Streamer | None
    ) -> None:
        self.ids = input_ids  # (B, width + position)
        self.criteria = StoppingCriteriaList(others)
        self.fill, self.streamer = fill, streamer
        self.pads = pads  # transformers fills up finished rows only if there is an end-of-text token
        self.position = 0
        self.tokens: list[list[int]] = [[] for _ in input_ids]
        self.ended = [False] * len(input_ids)  # by its end-of-text token or its budget
        self.unfinished = [True] * len(input_ids)

    def add(self, row: int, tokens: Sequence[int], ended: bool) -> None:
        self.tokens[row] += tokens
        self.ended[row] = ended

    def advance(self) -> bool:
        """Show all positions that are complete; True once every row has finished."""
        while any(self.unfinished):
            column = [self._token(row) for row in range(len(self.tokens))]
            if None in column:
                return False
            chosen = torch.tensor(column, device=self.ids.device)
            self.ids = torch.cat([self.ids, chosen[:, None]], dim=1)
            self.position += 1
            for row, own in enumerate(self.tokens):
                if self.ended[row] and self.position >= len(own):
                    self.unfinished[row] = False
            if self.criteria:
                done = self.criteria(self.ids, None).tolist()
                self.unfinished = [u and not d for u, d in zip(self.unfinished, done, strict=True)]
            if self.streamer is not None:
                self.streamer.put(chosen.cpu())
        return True

    def _token(self, row: int) -> int | None:
        """A row's token at this position; None if it is not decoded yet."""
        if self.pads and not self.unfinished[row]:
            return self.fill
        if self.position < len(self.tokens[row]):
            return self.tokens[row][self.position]
        return self.fill if self.ended[row] else None

    def stop_check(self, row: int) -> Callable[[list[int]], bool]:
        """For `Request.halts`: True once the row's further tokens are of no use."""
        return lambda _: self.pads and not self.unfinished[row]
