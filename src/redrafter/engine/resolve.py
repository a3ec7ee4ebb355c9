"""From what the user says about a drafter to one bound to the target."""

from pathlib import Path
from typing import Any

from redrafter.config import Gamma
from redrafter.core.step import Drafter
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams, shipped
from redrafter.drafters.load import bind
from redrafter.errors import ConfigError
from redrafter.interop import folders
from redrafter.interop.find import WITH_NGRAMS, find
from redrafter.targets import Target, load_target


def resolve_drafter(drafter: Any, target: Target, gamma: Gamma | str | None = None) -> Drafter:
    """None or "none", "auto", "ngram", a folder or Hub id (of a drafter as we read them, or a causal LM), or a drafter.

    A name that ends in "+ngram" mixes n-grams into that drafter. `gamma` says how far a causal LM guesses, and no other
    drafter has it.
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
    if isinstance(drafter, str) and drafter.endswith(WITH_NGRAMS):
        inner = _resolve(drafter.removesuffix(WITH_NGRAMS), target, gamma)
        return inner if isinstance(inner, NgramDrafter) else WithNgrams(inner)
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
    folder = find(str(drafter))
    if net := folders.read_for(folder, target):
        return bind(net, target).use_int8()
    return ModelDrafter(load_target(str(folder), dtype=target.dtype, device=str(target.device)), target, gamma=gamma)
