"""SGLang's sampling parameters as ours, and the rule `seeded` for a token without a tree.

SGLang's objects are used by their attributes only; nothing here imports SGLang.
"""

import functools
import hashlib
from typing import Any

import torch
from torch import Tensor

from redrafter.core.noise import SEEDED, as_int64, gumbel
from redrafter.core.sampling import Sampling, floor
from redrafter.kernels import verify
from redrafter.kernels.argmax import argmax


def sampling_of(info: Any, vocab_size: int) -> Sampling:
    """SGLang's `SamplingBatchInfo` as `Sampling`. SGLang writes temperature 0 as top-k 1.

    Penalties and logit biases are left out: SGLang adds them to the logits itself.
    """
    greedy = info.top_ks <= 1
    off = torch.ones_like(info.top_ps)
    return Sampling(
        temperature=torch.where(greedy, 0.0, info.temperatures.flatten()),
        top_k=torch.where(greedy, vocab_size, info.top_ks.clamp(max=vocab_size)).long(),
        top_p=torch.where(info.top_ps < 1, info.top_ps, torch.inf),
        min_p=info.min_ps,
        repetition=off,
        presence=0 * off,
        frequency=0 * off,
        bias=None,
        sorts=info.need_top_p_sampling or info.need_top_k_sampling,
        floors=info.need_min_p_sampling,
        penalises=False,
        samples=not info.is_all_greedy,
    )


def searching(temperature: Tensor, samples: bool) -> Sampling:
    """What a beam search needs to know: filters never change which guess is the most probable."""
    off = torch.ones_like(temperature)
    return Sampling(
        temperature=temperature,
        top_k=off.long(),
        top_p=off,
        min_p=off,
        repetition=off,
        presence=off,
        frequency=off,
        bias=None,
        sorts=False,
        floors=False,
        penalises=False,
        samples=samples,
    )


@functools.cache
def greedy(rows: int, device: str) -> Sampling:
    """For batches without sampling: made once, since a step of one request is short."""
    return searching(torch.zeros(rows, device=device), samples=False)


def adjusted(logits: Tensor, info: Any, nodes: int) -> Tensor:
    """Logits (B · n, V) with the request's penalties and biases, as SGLang adds them: the same for every node."""
    each = functools.partial(torch.repeat_interleave, repeats=nodes, dim=0)
    if info.acc_additive_penalties is not None:
        logits = logits + each(info.acc_additive_penalties)
    if info.acc_scaling_penalties is not None:
        scale = each(info.acc_scaling_penalties)
        logits = torch.where(logits < 0, logits * scale, logits / scale)
    if info.logit_bias is not None:
        logits = logits + each(info.logit_bias)
    return logits


def choose(logits: Tensor, sampling: Sampling, seeds: Tensor, positions: Tensor) -> Tensor:
    """(B, V) logits after the tokens at `positions` (B,) -> (B,) the tokens that the rule `seeded` writes next."""
    if not sampling.samples:
        return argmax(logits)
    nodes = logits[:, None]

    def noise() -> Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        drawn = gumbel(seeds, positions[:, None] + 1, logits.shape[1], stream=SEEDED, dtype=dtype)
        return torch.where(sampling.temperature[:, None, None] > 0, drawn, 0.0)

    depths = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
    return verify.seeded(nodes, depths, sampling.temperature, seeds, positions, floor(nodes, sampling), SEEDED, noise)[
        :, 0
    ]


def seed_of(request: Any) -> int:
    """The request's own seed; without one, a number made from its name, which is the same on every rank."""
    given = request.sampling_params.sampling_seed
    if given is not None:
        return as_int64(int(given))
    return as_int64(int.from_bytes(hashlib.blake2b(str(request.rid).encode(), digest_size=8).digest(), "little"))
