"""Faster passes of few tokens on a CPU: little Python, and every weight read once.

Modules are recognised by their parameters and children, not by a model's name. A compiled forward replaces a module's
own only if both give the same result on random inputs, and all replacements stay only if the whole model still gives
the same logits. Other modules, and all passes of many tokens, use the model's own forwards. `Target.release` removes
the replacements.
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

Chosen = dict[str, int]
"""Module name -> index of its new forward among the module's candidates."""
TOLERANCE = 1e-5
"""Relative difference that another order of summation explains in a module. For a whole model it is ten times that."""


@torch.no_grad()
def install_cpu_forwards(target: Target) -> Chosen:
    """Replace forwards of a model that redrafter loaded, after a trial. Returns which candidate each module got."""
    if not replaceable(target):
        return {}
    before, chosen = _sample(target), {}
    installed = _Installed(target)
    for name, module in reversed(dict(target.model.named_modules()).items()):  # children before their parents
        for index, (forward, trial) in enumerate(_candidates(module)):
            if _agrees(module, forward, trial):
                installed.add(module, forward)
                chosen[name] = index
                break
    if not _gap(_sample(target), before) <= 10 * TOLERANCE:
        installed.remove()
        log.info("%s keeps all of its own forwards: the CPU kernels give other logits", target.name)
        return {}
    return chosen


def install_chosen(target: Target, chosen: Chosen) -> None:
    """Replace the forwards that `install_cpu_forwards` chose for the same model before, without another trial."""
    modules = dict(target.model.named_modules())
    installed = _Installed(target)
    for name, index in chosen.items():
        installed.add(modules[name], _candidates(modules[name])[index][0])


def replaceable(target: Target) -> bool:
    """Whether the model is in fp32 on a CPU, has no forward of a user's own, and the C++ runs here."""
    if any("forward" in vars(module) for module in target.model.modules()):
        return False
    return target.dtype == torch.float32 and all(runs_cpp(p.device) for p in target.model.parameters())


def _candidates(module: nn.Module) -> list[tuple[Forward, Trial]]:
    return [*candidates(module), *LayerForward.candidates(module)]


class _Installed:
    """The forwards that replace a target's own until the target is released."""

    def __init__(self, target: Target) -> None:
        self.forwards: list[tuple[nn.Module, Forward]] = []
        target.on_release(self.remove)

    def add(self, module: nn.Module, forward: Forward) -> None:
        bound = MethodType(forward, module)  # bound, so a copy of the model uses its own weights
        module.forward = bound
        self.forwards.append((module, bound))

    def remove(self) -> None:
        for module, forward in self.forwards:
            if vars(module).get("forward") is forward:
                del module.forward
        self.forwards.clear()


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
