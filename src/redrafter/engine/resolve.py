"""From what the user says about a drafter to one bound to the target."""

from pathlib import Path
from typing import Any

from redrafter.core.step import Drafter
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, RecurrentDrafter, checkpoint
from redrafter.errors import DrafterMismatch, ModelNotFound
from redrafter.interop import apple
from redrafter.targets import Target, load_target


def resolve_drafter(drafter: Any, target: Target) -> Drafter:
    """None or "none", "ngram", a folder or Hub id (recurrent, Apple's, or a causal LM), or a drafter."""
    if drafter is None or drafter == "none":
        return NoDrafter()
    if drafter == "ngram":
        return NgramDrafter()
    if not isinstance(drafter, str | Path):
        return drafter  # type: ignore[no-any-return]
    folder = _folder(str(drafter))
    model_type = checkpoint.read_config(folder).get("model_type")
    if model_type == checkpoint.MODEL_TYPE:
        return RecurrentDrafter.load(folder, target)
    if model_type == apple.MODEL_TYPE:
        return RecurrentDrafter(apple.read(folder), target)
    model = load_target(str(folder), dtype=target.dtype, device=str(target.device))
    if target.tokenizer is not None and model.tokenizer is not None:
        theirs, ours = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if theirs != ours:
            raise DrafterMismatch(
                f"the draft model {model.name} has another tokenizer ({len(theirs)} tokens) than the target "
                f"{target.name} ({len(ours)} tokens)"
            )
    return ModelDrafter(model, target)


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
            f"no drafter {drafter!r}: it is neither 'ngram', 'none', a folder here, nor a Hub id that can be reached"
        ) from error
