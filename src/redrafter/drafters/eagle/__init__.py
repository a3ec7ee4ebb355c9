"""EAGLE (arXiv 2401.15077, 2503.01840): decoder layers that guess features of the next token and read their guesses."""

from redrafter.drafters.eagle.config import EagleConfig
from redrafter.drafters.eagle.drafter import EagleDrafter
from redrafter.drafters.eagle.loss import training_features
from redrafter.drafters.eagle.network import EagleNet
from redrafter.drafters.registry import DrafterKind

KIND = DrafterKind(config=EagleConfig, network=EagleNet, drafter=EagleDrafter, features=training_features)

__all__ = ["KIND", "EagleConfig", "EagleDrafter", "EagleNet"]
