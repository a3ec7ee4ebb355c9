"""From a name to a recurrent drafter's network, in whichever format its folder is."""

from pathlib import Path

from redrafter.core.recurrent import RecurrentNet
from redrafter.drafters import checkpoint
from redrafter.errors import ModelNotFound
from redrafter.interop import apple, speculators
from redrafter.targets import Described


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


def recurrent(folder: Path, target: Described) -> RecurrentNet | None:
    """Ours, Apple's or one in the conventions of `speculators`; None if the folder holds something else."""
    config = checkpoint.read_config(folder)
    if speculators.is_one(config):
        net, made_for = speculators.read(folder)
        checkpoint.compare(made_for, target, f"the drafter {folder}", checkpoint.OTHERWISE)
        return net
    if config.get("model_type") == checkpoint.MODEL_TYPE:
        return checkpoint.read_for(folder, target)
    return apple.read(folder) if config.get("model_type") == apple.MODEL_TYPE else None
