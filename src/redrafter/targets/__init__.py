"""The model being sped up: any transformers causal LM, reached without patching it."""

from redrafter.targets.load import load_target
from redrafter.targets.target import Target

__all__ = ["Target", "load_target"]
