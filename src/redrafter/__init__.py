"""redrafter: large language models write faster without changing a single token of what they write."""

import contextlib
import gc
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from redrafter.config import Gamma, Grammar, RuleConfig, SamplingParams, Shape
from redrafter.errors import RedrafterError
from redrafter.version import __version__

if TYPE_CHECKING:
    from redrafter.drafters import RecurrentConfig
    from redrafter.engine import CUSTOM_GENERATE_FOLDER, Engine, custom_generate, load

__all__ = [
    "CUSTOM_GENERATE_FOLDER",
    "Engine",
    "Gamma",
    "Grammar",
    "RecurrentConfig",
    "RedrafterError",
    "RuleConfig",
    "SamplingParams",
    "Shape",
    "__version__",
    "custom_generate",
    "load",
]


def __getattr__(name: str) -> Any:
    """torch and transformers take seconds to import: only when something of the engine is asked for."""
    if name in ("CUSTOM_GENERATE_FOLDER", "Engine", "custom_generate", "load"):
        return _import("redrafter.engine", name)
    if name == "RecurrentConfig":
        return _import("redrafter.drafters", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import(module: str, name: str) -> Any:
    with without_collection():
        return getattr(import_module(module), name)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection inside: imports and models create objects that stay, and little garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
