"""The recurrent drafter of the ReDrafter papers: a small recurrent network on the target's hidden state."""

from redrafter.drafters.recurrent.config import RecurrentConfig
from redrafter.drafters.recurrent.drafter import RecurrentDrafter
from redrafter.drafters.recurrent.loss import training_features
from redrafter.drafters.recurrent.network import RecurrentNet
from redrafter.drafters.registry import DrafterKind

KIND = DrafterKind(config=RecurrentConfig, network=RecurrentNet, drafter=RecurrentDrafter, features=training_features)

__all__ = ["KIND", "RecurrentConfig", "RecurrentDrafter", "RecurrentNet"]
