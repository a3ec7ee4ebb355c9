"""EAGLE (arXiv 2401.15077, 2503.01840): decoder layers that guess features of the next token and read their guesses."""

from dataclasses import replace

from redrafter.drafters.eagle.config import Eagle3Config, EagleConfig
from redrafter.drafters.eagle.drafter import EagleDrafter
from redrafter.drafters.eagle.loss import training_features
from redrafter.drafters.eagle.network import EagleNet
from redrafter.drafters.registry import DrafterKind

KIND = DrafterKind(config=EagleConfig, network=EagleNet, drafter=EagleDrafter, features=training_features)
EAGLE3 = replace(KIND, config=Eagle3Config)

__all__ = ["EAGLE3", "KIND", "Eagle3Config", "EagleConfig", "EagleDrafter", "EagleNet"]
