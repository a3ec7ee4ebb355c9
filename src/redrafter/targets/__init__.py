"""The target: the model whose text is written, any causal LM of transformers."""

from redrafter.targets.load import load_target
from redrafter.targets.target import Target, TargetInfo

__all__ = ["Target", "TargetInfo", "load_target"]
