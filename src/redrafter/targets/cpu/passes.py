"""Faster passes of few tokens on a CPU: little Python, and every weight read once.

Modules are recognised by their parameters and children, not by a model's name. A compiled forward replaces a module's
own only if both give the same result on random inputs, and all replacements stay only if the whole model still gives
the same logits. Other modules, and all passes of many tokens, use the model's own forwards. `Target.release` removes
the replacements.
"""

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
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

TOLERANCE = 1e-5
"""Relative difference that another order of summation explains in a module. For a whole model it is ten times that."""


@torch.no_grad()
def install_cpu_forwards(target: Target) -> None:
    """Replace forwards of a model that redrafter loaded, if it is in fp32 on a CPU and there is a C++ compiler."""
    modules = list(target.model.modules())
    if any("forward" in vars(m) for m in modules):  # a user's own forwards stay in place
        return
    if target.dtype != torch.float32 or not all(runs_cpp(p.device) for p in target.model.parameters()):
        return
    before = _sample(target)
    installed: list[tuple[nn.Module, Forward]] = []
    for module in reversed(modules):  # children before their parents
        for forward, trial in (*candidates(module), *LayerForward.candidates(module)):
            if _agrees(module, forward, trial):
                bound = MethodType(forward, module)  # bound, so a copy of the model uses its own weights
                module.forward = bound
                installed.append((module, bound))
                break
    target.on_release(partial(_uninstall, installed))
    if not _gap(_sample(target), before) <= 10 * TOLERANCE:
        _uninstall(installed)
        log.info("%s keeps all of its own forwards: the CPU kernels give other logits", target.name)


def _uninstall(installed: list[tuple[nn.Module, Forward]]) -> None:
    for module, forward in installed:
        if vars(module).get("forward") is forward:
            del module.forward
    installed.clear()


def _agrees(module: nn.Module, forward: Forward, trial: Trial) -> bool:
    try:
        wanted, made = (_tried(f, module, trial) for f in (type(module).forward, forward))
    except Exception as error:  # a module with the expected parts but another forward
        log.debug("%s is not replaced: %s", type(module).__name__, error)
        return False
    return wanted.shape == made.shape and _gap(made, wanted) <= TOLERANCE


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
    """The same random numbers each time; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed every device, and keep a stack trace for each device that is not there.
        torch.default_generator.manual_seed(0)
        yield


def _sample(target: Target) -> Tensor:
    """Logits of a small tree after a random prompt."""
    with _seeded():
        tokens = torch.randint(target.vocab_size, (1, 20))
        tree, _ = pack_beam(torch.randint(target.vocab_size, (1, 2, 3)), tokens[:, 0])
    cache = KVCache(slots=tokens.shape[1] + tree.nodes + 1)
    target.prefill(tokens, [tokens.shape[1]], cache, ())
    return target.verify(tree, torch.tensor([tokens.shape[1]]), cache, ())[0]
