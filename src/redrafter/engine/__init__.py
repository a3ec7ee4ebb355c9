"""The public face: load a model, generate, stream."""

from redrafter.engine.engine import Engine, load
from redrafter.engine.transformers import CUSTOM_GENERATE_FOLDER, custom_generate

__all__ = ["CUSTOM_GENERATE_FOLDER", "Engine", "custom_generate", "load"]
