"""The verification methods of Wagner et al. (2024), for comparison: `paper_exact`, and `sigmoid_lossy`, which is lossy.

Logits are already divided by the temperature and filtered. Random numbers are arguments: uniform `coins` (B, G) and
exponentials `race` (B, V).
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
    """Rejection sampling, tile by tile over probabilities. Arguments and results as in `kernels.verify.naive.fused`."""
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
    """LOSSY: sigmoids of rescaled logits replace probabilities, so the output does not have the target's distribution.

    The paper does not say how the token after the last accepted one is sampled; here it comes from the softmax.
    """
    ratio, rest, mass = _tiles(target)(target, draft, scale)
    accepted = naive.stop(ratio, tokens, counts, coins)
    own = naive.at(target, accepted).float().softmax(-1)
    return naive.draw(rest, mass, own, tokens, counts, accepted, race), accepted
