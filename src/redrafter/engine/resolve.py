"""From what the user says about a drafter to one bound to the target."""

import logging
from pathlib import Path
from typing import Any

from redrafter.bounds import shown
from redrafter.config import Gamma
from redrafter.core.step import Drafter
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams, registry, shipped
from redrafter.drafters.load import bind_own
from redrafter.drafters.traits import gives_probabilities, network_of
from redrafter.errors import ConfigError, RedrafterError, first_line
from redrafter.interop import folders, mtp, published
from redrafter.interop.find import WITH_NGRAMS, find
from redrafter.targets import Target, load_target

log = logging.getLogger(__name__)

PARTS = ("begin", "draft", "advance", "keep", "layers", "default_shape")
"""Of `core.step.Drafter`."""


def resolve_drafter(
    drafter: Any, target: Target, gamma: Gamma | str | None = None, *, trust_remote_code: bool = False
) -> Drafter:
    """None, a name of `drafters.registry` or "auto", a folder or Hub id (of a drafter or a causal LM), or a drafter.

    "recurrent" is the drafter that comes with the package, "mtp" the module in the target's own checkpoint. A name that
    ends in "+ngram" mixes n-grams into that drafter. "auto" is "recurrent+ngram" where a drafter comes with the package
    for this target, "mtp+ngram" on a CPU where the target's checkpoint has a module that loads, otherwise "ngram".
    A folder may be a published drafter of another project, whose conventions are then measured.
    `gamma` says how far a causal LM guesses, and no other drafter has it.
    `trust_remote_code` lets a causal LM's folder run Python code of its own.
    """
    if isinstance(gamma, str):
        gamma = Gamma.of(gamma)
    found = _resolve(drafter, target, gamma, trust_remote_code)
    network = network_of(found)
    if gamma is not None and not isinstance(network, ModelDrafter):
        named = type(found if network is None else network).__name__
        raise ConfigError(f"gamma is for a drafter that is a causal LM, and this is {named}: set the beam's length")
    return found


def _resolve(drafter: Any, target: Target, gamma: Gamma | None, trusts: bool) -> Drafter:
    if drafter is None:
        return NoDrafter()
    if not isinstance(drafter, str | Path):
        if hasattr(drafter, "get_output_embeddings"):  # a loaded causal LM
            return ModelDrafter(load_target(drafter), target, gamma=gamma)
        check_drafter(drafter)
        return drafter  # type: ignore[no-any-return]
    if drafter in ("auto", "auto" + WITH_NGRAMS):
        if shipped.find(target) is None:
            return _with_module(target, gamma, trusts) or NgramDrafter()
        drafter = "recurrent" + WITH_NGRAMS
    if isinstance(drafter, str) and drafter.endswith(WITH_NGRAMS):
        inner = WithNgrams(_resolve(drafter.removesuffix(WITH_NGRAMS), target, gamma, trusts))
        if not gives_probabilities(inner.inner):
            raise ConfigError(
                f"n-grams mix into a drafter that gives probabilities, which {type(inner.inner).__name__} does not: "
                f"leave out {WITH_NGRAMS}"
            )
        return inner
    if isinstance(drafter, str) and (make := registry.maker(drafter)) is not None:
        made = make(target)
        check_drafter(made)
        return made  # type: ignore[no-any-return]
    folder = find(str(drafter))
    if found := published.read(folder, target):
        from redrafter.interop import conventions  # imports transformers, which packed weights do not need

        return conventions.choose(found, target)
    if net := folders.read_for(folder, target):
        return bind_own(net, target)
    options = {"trust_remote_code": True} if trusts else {}
    model = load_target(str(folder), dtype=target.dtype, device=str(target.device), **options)
    return ModelDrafter(model, target, gamma=gamma)


def _with_module(target: Target, gamma: Gamma | None, trusts: bool) -> Drafter | None:
    """The MTP module of the target's checkpoint, with n-grams; None where there is none that loads."""
    if target.device.type != "cpu":  # its steps are not recorded yet, those of n-grams are
        return None
    try:
        return _resolve(mtp.MTP + WITH_NGRAMS, target, gamma, trusts) if mtp.exists(target) else None
    except Exception as error:  # a module that nobody asked for must not keep the model from running
        reason = error if isinstance(error, RedrafterError) else first_line(error)
        log.warning("%s is drafted for with n-grams alone: %s", target.name, reason)
        return None


def check_drafter(drafter: Any) -> None:
    """Raise ConfigError for an object that is no `core.step.Drafter`."""
    if not hasattr(drafter, "draft"):
        raise ConfigError(f"a drafter is a name, a folder, a causal LM or a drafter object, not {shown(drafter)}")
    if isinstance(drafter, type):
        raise ConfigError(f"{drafter.__name__} is a class: give an instance, {drafter.__name__}()")
    if missing := [part for part in PARTS if not hasattr(drafter, part)]:
        raise ConfigError(f"{type(drafter).__name__} is no drafter: it lacks {', '.join(missing)}")
