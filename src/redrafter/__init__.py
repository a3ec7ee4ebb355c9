"""redrafter: large language models write faster without changing a single token of what they write."""

from redrafter.config import RecurrentConfig, RuleConfig, SamplingParams, Shape
from redrafter.engine import Engine, custom_generate, load
from redrafter.errors import RedrafterError
from redrafter.version import __version__

__all__ = [
    "Engine",
    "RecurrentConfig",
    "RedrafterError",
    "RuleConfig",
    "SamplingParams",
    "Shape",
    "__version__",
    "custom_generate",
    "load",
]
