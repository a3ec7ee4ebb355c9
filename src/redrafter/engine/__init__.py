"""The public face: load a model, generate, stream."""

from redrafter.engine.engine import Engine, load
from redrafter.engine.transformers import custom_generate

__all__ = ["Engine", "custom_generate", "load"]
