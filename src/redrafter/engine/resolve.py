"""From what the user says about a drafter to one bound to the target."""

from pathlib import Path
from typing import Any

from redrafter.core.step import Drafter
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, RecurrentDrafter, shipped
from redrafter.errors import ConfigError
from redrafter.interop import folders
from redrafter.targets import Target, load_target


def resolve_drafter(drafter: Any, target: Target) -> Drafter:
    """None or "none", "auto", "ngram", a folder or Hub id (a recurrent drafter or a causal LM), or a drafter."""
    if drafter is None or drafter == "none":
        return NoDrafter()
    if drafter == "auto":
        drafter = shipped.find(target) or "ngram"
    if drafter == "ngram":
        return NgramDrafter()
    if not isinstance(drafter, str | Path):
        if hasattr(drafter, "get_output_embeddings"):  # a loaded causal LM
            return ModelDrafter(load_target(drafter), target)
        if not hasattr(drafter, "draft"):
            raise ConfigError(f"a drafter is a name, a folder, a causal LM or a drafter object, not {drafter!r}")
        return drafter  # type: ignore[no-any-return]
    folder = folders.find(str(drafter))
    if net := folders.read_for(folder, target):
        return RecurrentDrafter(net, target).lean()
    return ModelDrafter(load_target(str(folder), dtype=target.dtype, device=str(target.device)), target)
