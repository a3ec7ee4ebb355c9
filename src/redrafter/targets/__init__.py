"""The model being sped up: any transformers causal LM."""

from redrafter.targets.load import load_target
from redrafter.targets.target import Described, Target

__all__ = ["Described", "Target", "load_target"]
