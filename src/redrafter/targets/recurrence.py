"""Layers of a transformers model that keep a recurrent state: where they are, and how they run over trees.

A mixer is a module that keeps such a state. It is recognised by what it does: in a trial pass it updates the states of
a transformers cache. To run it over a tree, its own forward is called with all nodes of one depth, one token each,
and a cache that holds their parents' states. So the mathematics stays the model's own, and all families work alike.
The rest of the model sees all nodes at once.
"""

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer

from redrafter.core.recurrence import States, TextPass, TreePass
from redrafter.errors import UnsupportedTarget
from redrafter.targets.hf_cache import HFCache

UPDATES = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
"""Methods of a transformers cache by which a mixer stores its state."""


class MixerCache(Cache):  # type: ignore[misc]
    """What a mixer sees as the model's cache in one call: the states of the call's own rows."""

    def __init__(self, index: int, layer: LinearAttentionLayer) -> None:
        super().__init__(layers=[layer] * (index + 1))
        self.layer = layer

    # MiniMax reads and stores its state by the next two methods.
    def get_linear_cache(self, layer_idx: int) -> Tensor | None:  # noqa: ARG002
        return getattr(self.layer, "linear_cache", None)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:  # noqa: ARG002
        self.layer.linear_cache = linear_cache


class Mixer:
    """A module with a recurrent state, and the states as transformers' layer objects hold them."""

    def __init__(self, module: nn.Module, index: int, number_of_states: int) -> None:
        self.module, self.index, self.number_of_states = module, index, number_of_states
        self.example: LinearAttentionLayer | None = None  # with some text behind it: its flags and sizes
        self.names = [*inspect.signature(type(module).forward).parameters][1:]

    def layer(self, states: States | None) -> LinearAttentionLayer:
        """A layer object with these states; a new one where no text comes before."""
        if states is None:
            return LinearAttentionLayer(number_of_states=self.number_of_states)
        layer = copy.copy(self.example)
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, dict(value))
        for where, x in states.items():
            name, key = cast(tuple[str, Hashable], where)
            if key is None:
                setattr(layer, name, x)
            else:
                getattr(layer, name)[key] = x
        return layer

    def states(self, layer: LinearAttentionLayer) -> States:
        """All tensors of a layer object. The first one that is seen becomes the example."""
        if self.example is None:
            self.example = layer
        states: dict[Hashable, Tensor] = {}
        for name, value in vars(layer).items():
            if isinstance(value, Tensor):
                states[name, None] = value
            elif isinstance(value, dict):
                states |= {(name, key): x for key, x in value.items() if isinstance(x, Tensor)}
        return states


class Recurrence:
    """The mixers of a model. While a pass is `running`, their forwards are replaced.

    together: whether their forwards go on from a state over several tokens at once, as `reads_together` finds out.
    """

    together = True

    def __init__(self, model: Any, config: Any, cache_name: str) -> None:
        self.cache_class = _cache_class(model)
        self.mixers = _mixers(model, config, cache_name)
        if not self.mixers:
            raise UnsupportedTarget(
                f"{type(model).__name__} keeps its recurrent state elsewhere than in a transformers cache, so a tree "
                "cannot be verified"
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the mixers by the order of the pass's tokens, inside."""
        before = [(mixer.module, vars(mixer.module).get("forward")) for mixer in self.mixers]
        for place, mixer in enumerate(self.mixers):
            mixer.module.forward = partial(self._forward, place, mixer, mixer.module.forward)
        try:
            yield
        finally:
            for module, forward in before:
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    def _forward(self, place: int, mixer: Mixer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A mixer's forward over a whole pass, from calls of its own one."""
        given = dict(zip(mixer.names, args, strict=False)) | kwargs
        cache = next((x for x in given.values() if isinstance(x, HFCache)), None)
        assert cache is not None, "a pass of a recurrent target without our cache"
        hidden = next(x for x in given.values() if isinstance(x, Tensor) and x.dim() == 3)
        whole: list[Any] = []

        def run(rows: Tensor, columns: Tensor, states: States | None) -> States:
            layer = mixer.layer(states)
            inner = MixerCache(mixer.index, layer)
            at = (rows[:, None], columns)
            part = {name: _picked(x, name, at, hidden.shape[:2], inner) for name, x in given.items()}
            output = forward(**part)
            outputs = output if isinstance(output, tuple) else (output,)
            if not whole:
                whole.extend(_room(x, columns.shape, hidden.shape[:2]) for x in outputs)
                whole.append(isinstance(output, tuple))
            for x, new in zip(whole, outputs, strict=False):
                if x is not None:
                    x[tuple(i.to(x.device) for i in at)] = new
            return mixer.states(layer)

        memory, order = cache.kv.recurrent, cache.order
        if isinstance(order, TreePass):
            memory.run_tree(place, order, len(hidden), run)
        elif isinstance(order, TextPass):
            memory.run_text(place, order, hidden.device, run, self.together)
        else:
            raise UnsupportedTarget("a model with a recurrent state verifies trees and reads texts, and nothing else")
        *outputs, several = whole
        return tuple(outputs) if several else outputs[0]


def _picked(x: Any, name: str, at: tuple[Tensor, Tensor], size: torch.Size, cache: MixerCache) -> Any:
    """An argument for the tokens `at` (m, t) of a pass of `size` (B, n). They are no padding, so masks are left out."""
    if isinstance(x, HFCache):
        return cache
    if "mask" in name:
        return None
    if isinstance(x, tuple | list):
        return type(x)(_picked(y, name, at, size, cache) for y in x)
    if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[0] in (1, size[0]) and x.shape[1] == size[1]:
        return x.expand(size[0], *x.shape[1:])[tuple(i.to(x.device) for i in at)]
    return x


def _room(x: Any, part: torch.Size, whole: torch.Size) -> Tensor | None:
    """Zeros for an output of all tokens, like that of a part of them; None for an output of another kind."""
    if isinstance(x, Tensor) and x.shape[:2] == part:
        return x.new_zeros(*whole, *x.shape[2:])
    return None


def _cache_class(model: Any) -> type[HFCache]:
    """Our cache, made a subclass of the cache class that the model's code defines, if it does: some insist on it."""
    theirs = _own_caches(model)
    return type("HFCache", (HFCache, *theirs), {}) if theirs else HFCache


def _mixers(model: Any, config: Any, cache_name: str) -> list[Mixer]:
    """The modules that store a recurrent state in a pass over one token."""
    theirs = _own_caches(model)
    cache: Any = theirs[0]() if theirs else DynamicCache(config=config)
    running: list[nn.Module] = []
    seen: dict[nn.Module, Mixer] = {}

    def spied(update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = running[-1]
        if module not in seen:
            index: int = module.layer_idx  # type: ignore[assignment]
            states = getattr(cache.layers[index], "number_of_states", 1) if index < len(cache.layers) else 1
            seen[module] = Mixer(module, index, states)
        return update(*args, **kwargs)

    for name in UPDATES:
        if hasattr(cache, name):
            setattr(cache, name, partial(spied, getattr(cache, name)))
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            for hook in (
                module.register_forward_pre_hook(lambda module, _: running.append(module)),
                module.register_forward_hook(lambda *_: _drop(running), always_call=True),
            ):
                hooks.callback(hook.remove)
        device = model.get_input_embeddings().weight.device
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=True, **{cache_name: cache})
    return list(seen.values())


def _drop(running: list[nn.Module]) -> None:
    running.pop()


def _own_caches(model: Any) -> tuple[type, ...]:
    """Cache classes that the model's own code defines."""
    code = sys.modules[type(model).__module__]
    kinds = [x for x in vars(code).values() if isinstance(x, type) and issubclass(x, Cache)]
    return tuple(x for x in kinds if x.__module__ == code.__name__)
