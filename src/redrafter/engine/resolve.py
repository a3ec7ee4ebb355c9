"""From what the user says about a drafter to one bound to the target."""

from pathlib import Path
from typing import Any

from redrafter.config import Gamma
from redrafter.core.step import Drafter
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, RecurrentDrafter, checkpoint, shipped
from redrafter.drafters.load import load_drafter
from redrafter.errors import ConfigError, ModelNotFound
from redrafter.interop import apple
from redrafter.targets import Target, load_target


def resolve_drafter(drafter: Any, target: Target, gamma: Gamma | str | None = None) -> Drafter:
    """None or "none", "auto", "ngram", a folder or Hub id (of ours, Apple's, or a causal LM), or a drafter.

    `gamma` says how far a causal LM guesses, and no other drafter has it.
    """
    if isinstance(gamma, str):
        gamma = Gamma.of(gamma)
    found = _resolve(drafter, target, gamma)
    if gamma is not None and not isinstance(found, ModelDrafter):
        raise ConfigError(
            f"gamma is for a drafter that is a causal LM, and this is {type(found).__name__}: set the beam's length"
        )
    return found


def _resolve(drafter: Any, target: Target, gamma: Gamma | None) -> Drafter:
    if drafter is None or drafter == "none":
        return NoDrafter()
    if drafter == "auto":
        drafter = shipped.find(target) or "ngram"
    if drafter == "ngram":
        return NgramDrafter()
    if not isinstance(drafter, str | Path):
        if hasattr(drafter, "get_output_embeddings"):  # a loaded causal LM
            return ModelDrafter(load_target(drafter), target, gamma=gamma)
        if not hasattr(drafter, "draft"):
            raise ConfigError(f"a drafter is a name, a folder, a causal LM or a drafter object, not {drafter!r}")
        return drafter  # type: ignore[no-any-return]
    folder = _folder(str(drafter))
    model_type = checkpoint.read_config(folder).get("model_type")
    if model_type in checkpoint.KINDS:
        return load_drafter(folder, target)
    if model_type == apple.MODEL_TYPE:
        return RecurrentDrafter(apple.read(folder), target).lean()
    return ModelDrafter(load_target(str(folder), dtype=target.dtype, device=str(target.device)), target, gamma=gamma)


def _folder(drafter: str) -> Path:
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
