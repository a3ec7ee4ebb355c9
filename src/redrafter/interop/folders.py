"""From a name to a drafter's network, in whichever format its folder is."""

from pathlib import Path

from redrafter.drafters import checkpoint, files
from redrafter.drafters.base import DrafterNet
from redrafter.interop import apple, speculators
from redrafter.targets import TargetInfo


def read(folder: Path) -> tuple[DrafterNet, dict[str, str]] | None:
    """The network and what is known of its target: ours, Apple's, or as `speculators` has it. None: no such drafter."""
    config = files.read_config(folder)
    if "speculators_model_type" in config:
        return speculators.read(folder)
    if checkpoint.is_drafter(config):
        return checkpoint.read(folder)
    return (apple.read(folder), {}) if config.get("model_type") == apple.MODEL_TYPE else None


def read_for(folder: Path, target: TargetInfo) -> DrafterNet | None:
    """The same, for a target of the same tokenizer."""
    found = read(folder)
    if found is None:
        return None
    net, made_for = found
    checkpoint.compare(made_for, target, f"the drafter {folder}", checkpoint.OTHERWISE)
    return net
