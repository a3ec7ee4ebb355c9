"""How the target chooses a token: bias and penalties, then temperature, then top-k, top-p and min-p."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.config import SamplingParams
from redrafter.core.rows import per_row
from redrafter.core.transfer import put
from redrafter.core.tree import Tree
from redrafter.kernels.verify import floors
from redrafter.kernels.verify.naive import tempered

Processor = Callable[[Tensor, Tree], Tensor]
"""A logits processor: (logits (B, N+1, V), which it may change in place, tree) -> logits. Nodes see their own paths."""


def penalises(params: SamplingParams) -> bool:
    """Whether tokens are penalised that the text has already."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


@dataclass(frozen=True)
class Sampling:
    """One value per row. The booleans say which parts at least one row needs; the others are skipped."""

    temperature: Tensor  # (B,)
    top_k: Tensor  # (B,) V where off
    top_p: Tensor  # (B,) inf where off
    min_p: Tensor  # (B,)
    repetition: Tensor  # (B,)
    presence: Tensor  # (B,)
    frequency: Tensor  # (B,)
    bias: Tensor | None  # (B, V)
    sorts: bool  # any top-k or top-p
    floors: bool  # any min-p
    penalises: bool
    samples: bool  # any temperature above 0
    processor: Processor | None = None

    @property
    def filters(self) -> bool:
        return self.sorts or self.floors

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str) -> "Sampling":
        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return put(values, device, dtype)

        bias = None
        if any(p.logit_bias for p in params):
            bias = torch.zeros(len(params), vocab_size)
            for row, p in enumerate(params):
                bias[row, list(p.logit_bias)] = torch.tensor(list(p.logit_bias.values()))
            bias = bias.to(device)  # once: torch waits for the GPU at every element of its tensors
        top_k = [min(p.top_k, vocab_size) or vocab_size for p in params]
        return cls(
            temperature=column([p.temperature for p in params]),
            top_k=column(top_k, torch.long),
            # inf, not 1: rounding in a cumulative sum must not cut the tail of a row without top-p
            top_p=column([p.top_p if p.top_p < 1 else torch.inf for p in params]),
            min_p=column([p.min_p for p in params]),
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            bias=bias,
            sorts=any(p.top_p < 1 or 0 < p.top_k < vocab_size for p in params),
            floors=any(p.min_p > 0 for p in params),
            penalises=any(map(penalises, params)),
            samples=any(p.temperature > 0 for p in params),
        )


def node_counts(counts: Tensor, tree: Tree) -> Tensor:
    """(B, V) occurrences up to the root -> (B, N+1, V) up to each node, along its own path."""
    batch, n, _ = tree.mask.shape
    each = counts[:, None].repeat(1, n, 1)
    below_root = (tree.mask & (torch.arange(n, device=counts.device) > 0)).to(counts.dtype)
    return each.scatter_add_(2, tree.tokens[:, None].expand(batch, n, n), below_root)


def penalise(logits: Tensor, sampling: Sampling, counts: Tensor | None, tree: Tree) -> Tensor:
    """Bias, then repetition, presence and frequency penalties over prompt and path."""
    if sampling.bias is not None:
        logits = logits + sampling.bias[:, None].to(logits.dtype)
    if sampling.penalises:
        assert counts is not None, "rows with penalties carry their token counts"
        seen = node_counts(counts, tree)  # (B, N+1, V)
        repeated = torch.where(
            logits < 0, logits * per_row(sampling.repetition, logits), logits / per_row(sampling.repetition, logits)
        )
        logits = torch.where(seen > 0, repeated - per_row(sampling.presence, logits), logits)
        logits = logits - per_row(sampling.frequency, logits) * seen
    return logits


def restrict(logits: Tensor, sampling: Sampling) -> Tensor:
    """Divide by the temperature, then -inf outside top-k, top-p and min-p, in that order.

    >>> params = SamplingParams(temperature=1.0, top_k=3, top_p=0.8)
    >>> logits = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()
    >>> (restrict(logits, Sampling.of([params], 4, "cpu")) > -torch.inf)[0, 0].tolist()
    [True, True, False, False]
    """
    return tempered(logits, sampling.temperature, floor(logits, sampling))


def node_logits(logits: Tensor, sampling: Sampling, counts: Tensor | None, tree: Tree) -> Tensor:
    """(B, N+1, V) verified logits -> the same after bias, penalties and the user's processors.

    The result has at least fp32 if any of the three applies.
    """
    if sampling.bias is None and not sampling.penalises and sampling.processor is None:
        return logits
    changed = penalise(logits if logits.dtype == torch.float64 else logits.float(), sampling, counts, tree)
    if sampling.processor is None:
        return changed
    return sampling.processor(changed.clone() if changed is logits else changed, tree)


def floor(logits: Tensor, sampling: Sampling) -> Tensor | None:
    """(B, n, V) raw logits -> (B, n) the smallest that top-k, top-p and min-p keep; None without any filter.

    The raw logits that are not below the floor are exactly those that the filters keep, since a division by T keeps
    their order.
    """
    if not sampling.filters:
        return None
    return floors.smallest(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.sorts)
