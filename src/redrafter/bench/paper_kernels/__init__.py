"""The paper's two ways (Wagner et al., 2024), for comparison: `paper_exact`, and `sigmoid`, which is lossy.

Logits come tempered and filtered. Random numbers are given: coins (B, G) in (0, 1) and a race (B, V) of exponentials.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from redrafter.bench.paper_kernels import naive
from redrafter.kernels import runs_triton

SPEECH = (-1e3, 1e3)
TEXT = (-1e4, 1e4)
"""The paper's alpha and beta for speech and for text."""


def _tiles(logits: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if runs_triton(logits.device):
        from redrafter.bench.paper_kernels import triton

        tiles: Callable[..., tuple[Tensor, Tensor, Tensor]] = triton.tiles
        return tiles
    return naive.tiles


def paper_exact(
    target: Tensor, draft: Tensor, tokens: Tensor, counts: Tensor, coins: Tensor, race: Tensor
) -> tuple[Tensor, Tensor]:
    """The p/q test, tile by tile over probabilities. Arguments and results as naive.fused of the folder above."""
    p, q = (x.softmax(-1, dtype=torch.float32) for x in (target, draft))
    ratio, rest, mass = _tiles(p)(p, q, None)
    accepted = naive.stop(ratio, tokens, counts, coins)
    return naive.draw(rest, mass, naive.at(p, accepted), tokens, counts, accepted, race), accepted


def sigmoid_lossy(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    counts: Tensor,
    coins: Tensor,
    race: Tensor,
    scale: tuple[float, float] = TEXT,
) -> tuple[Tensor, Tensor]:
    """LOSSY: sigmoids of rescaled logits in the place of probabilities. The output does not have the target's
    distribution. The paper does not say how the token after the last accepted one is drawn; here from softmax.
    """
    ratio, rest, mass = _tiles(target)(target, draft, scale)
    accepted = naive.stop(ratio, tokens, counts, coins)
    own = naive.at(target, accepted).float().softmax(-1)
    return naive.draw(rest, mass, own, tokens, counts, accepted, race), accepted
