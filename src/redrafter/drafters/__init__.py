"""Drafters: they propose the tokens that the target verifies. Each one implements `core.step.Drafter`.

A drafter with a trained network is one folder: `config.py`, `network.py`, `drafter.py` and `loss.py`. `registry.py`
lists these folders. docs/extending.md shows how to add one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redrafter.drafters.causal_lm import ModelDrafter
    from redrafter.drafters.eagle import EagleConfig, EagleDrafter, EagleNet
    from redrafter.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaNet
    from redrafter.drafters.ngram import NgramDrafter
    from redrafter.drafters.none import NoDrafter
    from redrafter.drafters.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentNet
    from redrafter.drafters.with_ngrams import WithNgrams

_MODULES = {
    "EagleConfig": "eagle",
    "EagleDrafter": "eagle",
    "EagleNet": "eagle",
    "MedusaConfig": "medusa",
    "MedusaDrafter": "medusa",
    "MedusaNet": "medusa",
    "ModelDrafter": "causal_lm",
    "NgramDrafter": "ngram",
    "NoDrafter": "none",
    "RecurrentConfig": "recurrent",
    "RecurrentDrafter": "recurrent",
    "RecurrentNet": "recurrent",
    "WithNgrams": "with_ngrams",
}

__all__ = [
    "EagleConfig",
    "EagleDrafter",
    "EagleNet",
    "MedusaConfig",
    "MedusaDrafter",
    "MedusaNet",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "RecurrentConfig",
    "RecurrentDrafter",
    "RecurrentNet",
    "WithNgrams",
]


def __getattr__(name: str) -> Any:
    """Import on first use: the registry and the training options must be readable without importing torch."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
