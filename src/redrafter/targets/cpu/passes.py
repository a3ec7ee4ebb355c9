"""A model's few-token passes on a CPU with little Python, every weight read once.

Modules are recognised by what they are made of, never by a model's name. A compiled forward takes the place of a
module's own only after both gave the same on random inputs, and all of them stay only if the whole model still gives
the same logits. What is not recognised keeps its own forward, and so does every pass of many tokens.
"""

import contextlib
import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.core.cache import KVCache
from redrafter.core.tree import pack_beam
from redrafter.kernels import runs_cpp
from redrafter.targets.cpu.layer import LayerForward
from redrafter.targets.cpu.modules import Forward, Trial, candidates
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

SAME = 1e-5
"""Relative difference that another order of summation explains, in a module; in a whole model ten times that."""


@torch.no_grad()
def lean(target: Target) -> None:
    """Make a model that we loaded ourselves lean, if it is in fp32 on a CPU and there is a compiler."""
    modules = list(target.model.modules())
    if any("forward" in vars(m) for m in modules):  # others' hooks stay as they are
        return
    if target.dtype != torch.float32 or not all(runs_cpp(p.device) for p in target.model.parameters()):
        return
    before = _sample(target)
    for module in reversed(modules):  # parts before the whole
        for forward, trial in (*candidates(module), *LayerForward.candidates(module)):
            if _agrees(module, forward, trial):
                module.forward = MethodType(forward, module)  # bound: a copy of the model gets its own
                break
    if not _gap(_sample(target), before) <= 10 * SAME:
        for module in modules:
            vars(module).pop("forward", None)
        log.info("%s keeps all of its own forward passes: the CPU's path gives other logits", target.name)


def _agrees(module: nn.Module, forward: Forward, trial: Trial) -> bool:
    try:
        wanted, made = (_tried(f, module, trial) for f in (type(module).forward, forward))
    except Exception as error:  # a module that only looks like one we know
        log.debug("%s is not replaced: %s", type(module).__name__, error)
        return False
    return wanted.shape == made.shape and _gap(made, wanted) <= SAME


def _tried(forward: Any, module: nn.Module, trial: Trial) -> Tensor:
    with _seeded():
        hidden, others = trial(module)
    result = forward(module, hidden, **others)
    first: Tensor = result[0] if isinstance(result, tuple) else result
    return first


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=torch.finfo(torch.float32).tiny))


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """The same random numbers each time, and nobody else's touched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            0
        )  # not all devices': that keeps a stack trace for each until there is a GPU
        yield


def _sample(target: Target) -> Tensor:
    """Logits of a small tree behind a random prompt."""
    with _seeded():
        tokens = torch.randint(target.vocab_size, (1, 20))
        tree, _ = pack_beam(torch.randint(target.vocab_size, (1, 2, 3)), tokens[:, 0])
    cache = KVCache(slots=tokens.shape[1] + tree.nodes + 1)
    target.prefill(tokens, [tokens.shape[1]], cache, ())
    return target.verify(tree, torch.tensor([tokens.shape[1]]), cache, ())[0]
