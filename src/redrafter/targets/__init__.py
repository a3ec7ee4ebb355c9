"""The target: the model whose text is written, any causal LM of transformers."""

from redrafter.targets.load import load_target
from redrafter.targets.target import Target, TargetInfo
from redrafter.targets.widen import SHAPES, Wide, widen

__all__ = ["SHAPES", "Target", "TargetInfo", "Wide", "load_target", "widen"]
