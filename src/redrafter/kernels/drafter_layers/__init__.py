"""The recurrent drafter's layers for the few rows of a beam, one kernel each. See naive.py for what they compute.

The network asks `narrow` whether the kernels apply, and else uses its own modules: those can be differentiated, and on
a CPU hold int8 weights.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from redrafter.kernels import compile_kernels, runs_triton
from redrafter.kernels.drafter_layers import naive
from redrafter.kernels.drafter_layers.naive import rounded as rounded

log = logging.getLogger(__name__)

ROWS = 64
"""Most rows that the kernels take; for more rows torch's own products are faster."""


_TRUSTED: dict[tuple[torch.device, torch.dtype], bool] = {}


def narrow(x: Tensor, rows: int | None = None) -> bool:
    """Whether the kernels apply to x, or to `rows` rows like it: few rows, no gradient, and a passed `trial`."""
    few = (x.numel() // x.shape[-1] if rows is None else rows) <= ROWS
    return few and _TRUSTED.get((x.device, x.dtype), False) and not torch.is_grad_enabled()


@torch.no_grad()
def trial(like: Tensor) -> None:
    """Compare the kernels with torch once per device and dtype; `narrow` is true only where they agree."""
    key = (like.device, like.dtype)
    if key in _TRUSTED or not runs_triton(like.device) or like.dtype == torch.float64:
        return
    examples = _examples(like)
    compile_kernels(lambda: [globals()[name](*args) for name, args in examples], like.device)
    try:
        _TRUSTED[key] = all(_agrees(name, args) for name, args in examples)
    except Exception as error:  # a compiler may raise anything
        _TRUSTED[key] = False
        log.warning("the drafter's kernels do not run on %s: %s", like.device, f"{error}".splitlines()[0])


def _examples(like: Tensor) -> list[tuple[str, tuple[Any, ...]]]:
    made = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        values: Tensor = torch.randn(shape, generator=made) * float(shape[-1]) ** -0.5
        return values.to(device=like.device, dtype=like.dtype)

    def below(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=made).to(like.device)

    state, wide, reading = random(2, 3, 80) * 5, random(48, 120), random(2, 3, 40)
    memory = torch.randn(2, 2, 20, 20, generator=made).to(like.device)
    return [
        ("block", (state, random(80, 80), random(80), True)),
        ("joint", (state, wide[:, :80], random(2, 1, 48), reading, wide[:, 80:])),
        ("cell", (state, random(160, 80), random(160), random(2, 3, 160))),
        ("cell", (state, random(160, 80), random(160), random(9, 160), below(3, 2, 4), below(11, 2, 4), below(9, 11))),
        ("read", (reading, memory)),
        ("head", (*naive.rounded(state), *naive.rounded(random(200, 80)), like.dtype)),
    ]


def _agrees(name: str, args: tuple[Any, ...]) -> bool:
    got, want = globals()[name](*args), getattr(naive, name)(*args)
    return torch.allclose(got.float(), want.float(), rtol=0.05, atol=0.05)


@torch.library.custom_op("redrafter::block", mutates_args=())
def block(x: Tensor, weight: Tensor, bias: Tensor, normed: bool) -> Tensor:
    from redrafter.kernels.drafter_layers import triton

    return triton.block(x.contiguous(), weight, bias, normed)


@torch.library.custom_op("redrafter::joint", mutates_args=())
def joint(state: Tensor, weight: Tensor, share: Tensor, reading: Tensor | None, columns: Tensor | None) -> Tensor:
    from redrafter.kernels.drafter_layers import triton

    given = None if reading is None else reading.contiguous()
    return triton.joint(state.contiguous(), weight, share.contiguous(), given, columns)


@torch.library.custom_op("redrafter::cell", mutates_args=())
def cell(
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    heard: Tensor,
    parents: Tensor | None = None,
    tokens: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    from redrafter.kernels.drafter_layers import triton

    picked = [None if x is None else x.contiguous() for x in (parents, tokens, places)]
    return triton.cell(state.contiguous(), weight, bias, heard.contiguous(), *picked)


@torch.library.custom_op("redrafter::read", mutates_args=())
def read(query: Tensor, memory: Tensor) -> Tensor:
    from redrafter.kernels.drafter_layers import triton

    return triton.read(query.contiguous(), memory.contiguous())


@torch.library.custom_op("redrafter::head", mutates_args=())
def head(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    from redrafter.kernels.drafter_layers import triton

    return triton.head(x.contiguous(), x_scale.contiguous(), weight, scale, dtype)


@block.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, normed: bool) -> Tensor:
    return x.new_empty(x.shape)


@joint.register_fake
def _(state: Tensor, weight: Tensor, share: Tensor, reading: Tensor | None, columns: Tensor | None) -> Tensor:
    return state.new_empty(*state.shape[:-1], weight.shape[0])


@cell.register_fake
def _(
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    heard: Tensor,
    parents: Tensor | None = None,
    tokens: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    return state.new_empty(*(state.shape[:-1] if parents is None else parents.shape), state.shape[-1])


@read.register_fake
def _(query: Tensor, memory: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@head.register_fake
def _(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)
