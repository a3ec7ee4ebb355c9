"""Block drafters (DFlash, DSpark, JetSpec): decoder layers over the target's hidden states guess a block at once."""

from redrafter.drafters.block.config import BlockConfig
from redrafter.drafters.block.drafter import BlockDrafter
from redrafter.drafters.block.loss import training_features
from redrafter.drafters.block.network import BlockNet
from redrafter.drafters.registry import DrafterKind

KIND = DrafterKind(config=BlockConfig, network=BlockNet, drafter=BlockDrafter, features=training_features)

__all__ = ["KIND", "BlockConfig", "BlockDrafter", "BlockNet"]
