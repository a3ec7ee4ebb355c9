"""From a name to a drafter's network, in whichever format its folder is."""

from pathlib import Path

from redrafter.drafters import checkpoint
from redrafter.drafters.base import DrafterNet
from redrafter.errors import ModelNotFound
from redrafter.interop import apple, speculators
from redrafter.targets import TargetInfo


def find(drafter: str) -> Path:
    """A folder here, or that of a Hub id."""
    if Path(drafter).is_dir():
        return Path(drafter)
    if Path(drafter).exists():
        raise ModelNotFound(f"the drafter {drafter!r} is a file; give the folder it lies in")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(drafter))
    except Exception as error:
        raise ModelNotFound(
            f"no drafter {drafter!r}: it is neither 'auto', 'ngram', 'none', a folder here nor a Hub id within reach"
        ) from error


def read(folder: Path) -> tuple[DrafterNet, dict[str, str]] | None:
    """The network and what is known of its target: ours, Apple's, or as `speculators` has it. None: no such drafter."""
    config = checkpoint.read_config(folder)
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
