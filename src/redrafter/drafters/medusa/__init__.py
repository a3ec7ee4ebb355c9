"""Medusa (arXiv 2401.10774): one small network for each depth; all of them guess at once."""

from redrafter.drafters.medusa.config import MedusaConfig
from redrafter.drafters.medusa.drafter import MedusaDrafter
from redrafter.drafters.medusa.loss import measure_accuracies, training_features
from redrafter.drafters.medusa.network import MedusaNet
from redrafter.drafters.registry import DrafterKind

KIND = DrafterKind(
    config=MedusaConfig,
    network=MedusaNet,
    drafter=MedusaDrafter,
    features=training_features,
    calibrate=measure_accuracies,
)

__all__ = ["KIND", "MedusaConfig", "MedusaDrafter", "MedusaNet"]
