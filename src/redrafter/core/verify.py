"""Verification from logits, by seed: the GPU's kernels where they run, their oracle elsewhere. Same tokens either way.

Random numbers are those of the rules in accept.py and rejection.py: position p + 1 + d for what stands d places behind
the last token, which stands at p.
"""

import torch
from torch import Tensor

from redrafter.core.accept import Accepted, walk
from redrafter.core.noise import ACCEPT, RESIDUAL, SEEDED, gumbel, uniform
from redrafter.core.tree import Tree
from redrafter.kernels import runs_triton, verify
from redrafter.kernels.verify import naive


def _noise_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def on_kernel(*logits: Tensor) -> bool:
    """Whether the kernels do it: on a GPU, but in fp64."""
    return all(runs_triton(x.device) and x.dtype != torch.float64 for x in logits)


def seeded_from_logits(
    logits: Tensor,
    tree: Tree,
    *,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    floor: Tensor | None = None,
) -> Accepted:
    """`accept_seeded` without scores and noise in memory. Logits (B, N+1, V) raw, T (B,), `floor` (B, N+1)."""
    if on_kernel(logits):
        choice = verify.seeded(logits, tree.depths, temperature, seeds, positions, floor, SEEDED)
    else:
        ahead = positions[:, None] + 1 + torch.arange(tree.length + 1, device=logits.device)
        noise = gumbel(seeds, ahead, logits.shape[-1], stream=SEEDED, dtype=_noise_dtype(logits))
        choice = naive.seeded(logits, tree.depths, temperature, noise, floor)
    return walk(tree, choice, hit=tree.tokens == choice.gather(1, tree.parents))


def rejection_from_logits(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    *,
    counts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    floors: tuple[Tensor, Tensor] | None = None,
    streams: tuple[int, int] = (ACCEPT, RESIDUAL),
) -> tuple[Tensor, Tensor]:
    """The p/q test of a chain of drafted tokens (B, G) -> new tokens (B, G+1), and how many are accepted (B,).

    Raw logits (B, G+1, V) and (B, G, V); the first `counts` (B,) tokens of a row are real, and were sampled from the
    draft's logits under the same temperature and floors (B, G+1), (B, G). Entry `accepted` of the new tokens is the
    target's own; later ones have no meaning.
    """
    # The kernel's programs wait for words of each other, which AMD's caches may keep to themselves.
    if on_kernel(target, draft) and torch.version.hip is None:
        both = floors or (None, None)
        return verify.fused(target, draft, tokens, counts, temperature, seeds, positions, *both, *streams)
    dtype = _noise_dtype(target)
    ahead = positions[:, None] + 1 + torch.arange(tokens.shape[1], device=tokens.device)
    coins = uniform(seeds, ahead, 1, stream=streams[0], dtype=dtype)[..., 0]

    def noise(accepted: Tensor) -> Tensor:
        where = (positions + 1 + accepted)[:, None]
        return gumbel(seeds, where, naive.numbers(target.shape[-1]), stream=streams[1], dtype=dtype)[:, 0]

    return naive.fused(target, draft, tokens, counts, temperature, coins, noise, floors)
