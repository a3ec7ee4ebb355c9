"""Earlier occurrences of a text's end, and what followed them. See naive.py."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.ngram_match import naive
from redrafter.kernels.ngram_match.naive import continuations as continuations
from redrafter.kernels.ngram_match.naive import matches as matches


def chain(tokens: Tensor, lengths: Tensor, longest: int, shortest: int, length: int) -> tuple[Tensor, Tensor]:
    """See naive.py."""
    if runs_triton(tokens.device):
        found: tuple[Tensor, Tensor] = _chain(tokens, lengths, longest, shortest, length)
        return found
    return naive.chain(tokens, lengths, longest, shortest, length)


@torch.library.custom_op("redrafter::ngram_chain", mutates_args=())
def _chain(tokens: Tensor, lengths: Tensor, longest: int, shortest: int, length: int) -> tuple[Tensor, Tensor]:
    from redrafter.kernels.ngram_match import triton

    return triton.chain(tokens, lengths.contiguous(), longest, shortest, length)


@_chain.register_fake
def _(tokens: Tensor, lengths: Tensor, longest: int, shortest: int, length: int) -> tuple[Tensor, Tensor]:
    return tokens.new_empty(len(tokens), length), torch.empty_like(lengths)
