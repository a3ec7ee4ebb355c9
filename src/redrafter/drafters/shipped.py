"""The drafters in this package, each trained for one model."""

import json
from pathlib import Path
from typing import Any

from redrafter.drafters.base import NetDrafter
from redrafter.drafters.checkpoint import identity, same_weights
from redrafter.drafters.files import CONFIG_FILE
from redrafter.drafters.load import load_drafter
from redrafter.errors import ModelNotFound
from redrafter.targets import TargetInfo

FOLDER = Path(__file__).parent / "shipped"


def find(target: TargetInfo) -> Path | None:
    """The folder of the drafter trained for this model, if there is one."""
    own = identity(target)
    for config in sorted(FOLDER.glob(f"*/{CONFIG_FILE}")):
        made_for = json.loads(config.read_text())["target"]
        if same_weights(made_for, own) and own.get("tokenizer") in (made_for["tokenizer"], None):
            return config.parent
    return None


def load(target: TargetInfo) -> NetDrafter[Any]:
    """The drafter trained for this model."""
    folder = find(target)
    if folder is None:
        raise ModelNotFound(
            f"no recurrent drafter comes with the package for {target.name}: name the folder of one, or use 'ngram'"
        )
    return load_drafter(folder, target)
