"""redrafter's verification in transformers' assisted generation: `generate(assistant_model=..., do_sample=True)`."""

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
    """Verify assisted generation that samples with the fused kernel on a GPU, with the reference elsewhere.

    The text has the same distribution, but `torch.manual_seed` gives another text: each verification draws one number
    from torch's generator and derives all its random numbers from it.

    The block replaces a function of transformers for the whole process; the function is restored at the end.
    """
    original: Callable[..., tuple[Tensor, Tensor]] | None = getattr(utils, NAME, None)
    if original is None:
        raise ConfigError(f"this version of transformers has no function {NAME} to replace; use another version")
    setattr(utils, NAME, _replacement(original))
    try:
        yield
    finally:
        setattr(utils, NAME, original)


def _replacement(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def verify(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        given = inspect.signature(original).bind(*args, **options).arguments
        ended = given.pop(
            "is_done_candidate", False
        )  # an argument of older versions: the last draft token ends the text
        arguments = [
            given.pop(name) for name in ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits")
        ]
        if any(
            value is not None for value in given.values()
        ):  # such as an ensemble of p and q: lossy, left to transformers
            return original(*args, **options)
        new, accepted = speculative_sampling(*arguments)
        if ended and int(accepted) == arguments[2]:
            return new[:, :-1], accepted - 1
        return new, accepted

    return verify


def speculative_sampling(
    candidate_input_ids: Tensor, candidate_logits: Tensor, candidate_length: int, new_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as transformers' function: (1, n + 1) new tokens, and n, the number of accepted draft tokens.

    Temperature and filters have been applied to the logits. The host reads the result's length once.
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
