"""The public face: load a model, generate, stream."""

from typing import TYPE_CHECKING, Any

from redrafter.engine.engine import Engine, load

if TYPE_CHECKING:
    from redrafter.engine.transformers import CUSTOM_GENERATE_FOLDER, custom_generate

__all__ = ["CUSTOM_GENERATE_FOLDER", "Engine", "custom_generate", "load"]


def __getattr__(name: str) -> Any:
    """transformers' generation takes a second to import, and only `custom_generate` uses it."""
    if name in ("CUSTOM_GENERATE_FOLDER", "custom_generate"):
        from redrafter.engine import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
