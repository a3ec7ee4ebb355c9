"""The model being sped up: any transformers causal LM, reached without patching it."""

from redrafter.targets.load import load_target
from redrafter.targets.target import Described, Target
from redrafter.targets.widen import SHAPES, Wide, widen

__all__ = ["SHAPES", "Described", "Target", "Wide", "load_target", "widen"]
