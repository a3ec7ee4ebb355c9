"""Verification of drafted tokens, straight from logits. See naive.py for what each function computes.

The kernels compute random numbers from seeds (noise.py); the oracle takes random numbers that core/noise.py made.
A compiled step calls the kernels as custom operators, whose output shapes the compiler knows. Any other step calls
the kernels directly, since for one row the host's work for an operator takes as long as a launch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.verify import host, naive


def runs_kernels(*logits: Tensor) -> bool:
    """Whether the Triton kernels take these logits: they have no fp64."""
    return all(runs_triton(x.device) and x.dtype != torch.float64 for x in logits)


@torch.library.custom_op("redrafter::gumbel", mutates_args=())
def gumbel(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    """Gumbel noise by Triton: (B,) seeds, (B, n) positions -> (B, n, count) fp32. core/noise.py is the oracle."""
    from redrafter.kernels.verify import noise

    return noise.made(seeds, positions, count, stream)


@gumbel.register_fake
def _(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    return seeds.new_empty(*positions.shape, count, dtype=torch.float32)


def seeded(
    logits: Tensor,
    depths: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    floor: Tensor | None,
    stream: int,
    noise: Callable[[], Tensor],
) -> Tensor:
    """Raw logits (B, n, V) of tree nodes -> (B, n) the target's choice at each node.

    A node at depth d is chosen under the noise of (seed, position + 1 + d). `noise` makes (B, L+1, V) that noise by
    depth, for the oracle; the kernel computes the same numbers itself.
    """
    if not runs_kernels(logits):
        plain = logits.device.type == "cpu" and logits.dtype == torch.float32 and not torch.compiler.is_compiling()
        return (host.seeded if plain else naive.seeded)(logits, depths, temperature, noise(), floor)
    operator = seeded_operator if torch.compiler.is_compiling() else _seeded
    found: Tensor = operator(logits, depths, temperature, seeds, positions, floor, stream)
    return found


def where_sampled(noise: Tensor, temperature: Tensor) -> Tensor:
    """Noise (B, n, V) of rows with a temperature (B,) above 0; zeros in the other rows."""
    on_host = noise.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and (temperature.numpy() > 0).all():  # a pass over all the noise less
        return noise
    return torch.where(temperature[:, None, None] > 0, noise, 0.0)


def fused(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    counts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    floors: tuple[Tensor, Tensor] | None,
    streams: tuple[int, int],
    coins: Callable[[], Tensor],
    noise: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The p/q test of drafted tokens (B, G) -> new tokens (B, G+1) and how many are accepted (B,).

    `coins()` (B, G) and `noise(accepted)` make the oracle's random numbers; the kernel computes the same numbers from
    the seeds and the two streams.
    """
    # The kernel's programs wait for words that other programs write; AMD's caches may hide such words.
    if not runs_kernels(target, draft) or torch.version.hip is not None:
        return naive.fused(target, draft, tokens, counts, temperature, coins(), noise, floors)
    operator = fused_operator if torch.compiler.is_compiling() else _fused
    low, draft_low = floors or (None, None)
    found: tuple[Tensor, Tensor] = operator(
        target, draft, tokens, counts, temperature, seeds, positions, low, draft_low, streams[0], streams[1]
    )
    return found


def _seeded(
    logits: Tensor,
    depths: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    floor: Tensor | None,
    stream: int,
) -> Tensor:
    from redrafter.kernels.verify import triton

    rows = (temperature.float().contiguous(), seeds.contiguous(), positions.contiguous())
    return triton.seeded(logits, depths, *rows, floor, stream)


seeded_operator = torch.library.custom_op("redrafter::verify_seeded", _seeded, mutates_args=())


@seeded_operator.register_fake
def _(logits: Tensor, depths: Tensor, *rest: object) -> Tensor:
    return depths.new_empty(depths.shape, dtype=torch.long)


def _fused(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    counts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    target_floor: Tensor | None,
    draft_floor: Tensor | None,
    accept_stream: int,
    residual_stream: int,
) -> tuple[Tensor, Tensor]:
    from redrafter.kernels.verify import triton

    rows = (counts.contiguous(), temperature.float().contiguous(), seeds.contiguous(), positions.contiguous())
    streams = (accept_stream, residual_stream)
    return triton.fused(target, draft, tokens, *rows, target_floor, draft_floor, streams)


fused_operator = torch.library.custom_op("redrafter::verify_fused", _fused, mutates_args=())


@fused_operator.register_fake
def _(target: Tensor, draft: Tensor, tokens: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    batch, gamma = tokens.shape
    new = tokens.new_empty(batch, gamma + 1, dtype=torch.long)
    return new, new.new_empty(batch)
