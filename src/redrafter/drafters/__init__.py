"""The things that guess. Each obeys `core.step.Drafter`."""

from redrafter.drafters.model import ModelDrafter
from redrafter.drafters.ngram import NgramDrafter
from redrafter.drafters.plain import NoDrafter
from redrafter.drafters.recurrent import RecurrentDrafter

__all__ = ["ModelDrafter", "NgramDrafter", "NoDrafter", "RecurrentDrafter"]
