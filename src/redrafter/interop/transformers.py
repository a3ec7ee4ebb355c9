"""transformers' own assisted generation with our verification: `generate(assistant_model=..., do_sample=True)`."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils

from redrafter.core.rules.rejection import rejection_from_logits
from redrafter.errors import ConfigError

NAME = "_speculative_sampling"


@contextmanager
def use_fused_verification() -> Iterator[None]:
    """Inside, assisted generation that samples is verified by the fused kernel on a GPU, by its oracle elsewhere.

    The text has the same distribution as without. It is not the same text for one torch.manual_seed: one number of
    torch's generator is drawn for each verification, and seeds all that it needs.
    """
    original: Callable[..., tuple[Tensor, Tensor]] | None = getattr(utils, NAME, None)
    if original is None:
        raise ConfigError(f"this version of transformers has no {NAME} to put our verification in place of")
    setattr(utils, NAME, _in_place_of(original))
    try:
        yield
    finally:
        setattr(utils, NAME, original)


def _in_place_of(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def verify(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        given = inspect.signature(original).bind(*args, **options).arguments
        ended = given.pop("is_done_candidate", False)  # of older versions: the last guess ends the text
        ours = [
            given.pop(name) for name in ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits")
        ]
        if any(value is not None for value in given.values()):  # an ensemble of p and q, say: lossy, and not ours
            return original(*args, **options)
        new, accepted = speculative_sampling(*ours)
        if ended and int(accepted) == ours[2]:
            return new[:, :-1], accepted - 1
        return new, accepted

    return verify


def speculative_sampling(
    candidate_input_ids: Tensor, candidate_logits: Tensor, candidate_length: int, new_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """What transformers' function of that name does: (1, n + 1) new tokens, n of them accepted guesses.

    Logits come processed: temperature and filters are in them. The result's length is read on the host, once.
    """
    device = new_logits.device
    tokens = candidate_input_ids[:, candidate_input_ids.shape[1] - candidate_length :]
    new, accepted = rejection_from_logits(
        new_logits,
        candidate_logits,
        tokens,
        counts=torch.full((1,), candidate_length, device=device),
        temperature=torch.ones(1, device=device),
        seeds=torch.randint(-(2**63), 2**63 - 1, (1,), device=device),
        positions=torch.zeros(1, dtype=torch.long, device=device),
    )
    return new[:, : int(accepted) + 1], accepted[0]
