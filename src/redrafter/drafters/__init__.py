"""The things that guess. Each obeys `core.step.Drafter`."""

from redrafter.drafters.eagle import EagleDrafter
from redrafter.drafters.medusa import MedusaDrafter
from redrafter.drafters.model import ModelDrafter
from redrafter.drafters.ngram import NgramDrafter
from redrafter.drafters.plain import NoDrafter
from redrafter.drafters.recurrent import RecurrentDrafter

__all__ = ["EagleDrafter", "MedusaDrafter", "ModelDrafter", "NgramDrafter", "NoDrafter", "RecurrentDrafter"]
