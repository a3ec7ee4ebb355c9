"""Token texts in memory, with the length of each prompt. Training data and tuning both use them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.core.noise import as_int64


@dataclass(frozen=True, kw_only=True)
class Texts:
    """R texts as one flat token tensor, on the CPU."""

    tokens: Tensor  # (total,) int32
    starts: Tensor  # (R+1,) int64 offset of each row, and the end of the last one
    prompts: Tensor  # (R,) int64 number of prompt tokens at the start of each row
    temperatures: Tensor  # (R,) float32 sampling temperature of the other tokens
    seeds: Tensor  # (R,) int64 sampling seed of the other tokens
    rollouts: Tensor | None = None  # (total, T) int32 the target's greedy continuation after each token

    @staticmethod
    def of(
        rows: Sequence[Sequence[int]],
        prompts: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        rollouts: Sequence[Tensor] | None = None,
    ) -> "Texts":
        """From token ids; `rollouts` has (len(row), T) for each row.

        >>> two = Texts.of([[5, 6, 7], [8, 9]], [1, 1], [0.0, 1.0], [0, 1])
        >>> two.row(1).tolist(), two.lengths.tolist()
        ([8, 9], [3, 2])
        """
        return Texts(
            tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
            starts=_starts(torch.tensor([len(row) for row in rows], dtype=torch.int64)),
            prompts=torch.tensor(prompts, dtype=torch.int64),
            temperatures=torch.tensor(temperatures, dtype=torch.float32),
            seeds=torch.tensor([as_int64(seed) for seed in seeds], dtype=torch.int64),
            rollouts=None if rollouts is None else torch.cat(list(rollouts)).to(torch.int32).cpu(),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> Tensor:
        """(R,) number of tokens in each row, prompt included."""
        return self.starts.diff()

    def within(self, vocab_size: int) -> bool:
        """Whether all tokens are in a vocabulary; rollouts have -1 where they hold nothing.

        >>> Texts.of([[5, 6]], [1], [0.0], [0]).within(6)
        False
        """
        rollouts = torch.empty(0) if self.rollouts is None else self.rollouts
        return all(
            not x.numel() or least <= int(x.min()) <= int(x.max()) < vocab_size
            for x, least in ((self.tokens, 0), (rollouts, -1))
        )

    def row(self, index: int) -> Tensor:
        """(length,) the tokens of one row."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def select(self, rows: Tensor | Sequence[int]) -> "Texts":
        """A copy with only these rows, in this order.

        >>> Texts.of([[5, 6, 7], [8], [9, 9]], [1] * 3, [0.0] * 3, [0] * 3).select([2, 0]).tokens.tolist()
        [9, 9, 5, 6, 7]
        """
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        lengths = self.lengths[chosen]
        starts = _starts(lengths)
        shift = self.starts[chosen] - starts[:-1]
        where = torch.arange(int(starts[-1])) + shift.repeat_interleave(lengths)
        return Texts(
            tokens=self.tokens[where],
            starts=starts,
            prompts=self.prompts[chosen],
            temperatures=self.temperatures[chosen],
            seeds=self.seeds[chosen],
            rollouts=None if self.rollouts is None else self.rollouts[where],
        )


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def concatenate(parts: Sequence[Texts]) -> Texts:
    """All rows of all parts. Rollouts are kept only if every part has them."""
    rollouts = [part.rollouts for part in parts if part.rollouts is not None]
    return Texts(
        tokens=torch.cat([part.tokens for part in parts]),
        starts=_starts(torch.cat([part.lengths for part in parts])),
        prompts=torch.cat([part.prompts for part in parts]),
        temperatures=torch.cat([part.temperatures for part in parts]),
        seeds=torch.cat([part.seeds for part in parts]),
        rollouts=torch.cat(rollouts) if len(rollouts) == len(parts) else None,
    )
