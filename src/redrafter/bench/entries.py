"""Builds the contenders that a user names on the command line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from redrafter.bench.contenders import Contender, LlamaCpp, Ours, Transformers
from redrafter.bench.specs import REFERENCE, names_of
from redrafter.config import Shape
from redrafter.drafters import NoDrafter
from redrafter.engine import Engine
from redrafter.engine.resolve import resolve_drafter
from redrafter.errors import ConfigError
from redrafter.interop.find import WITH_NGRAMS, stands_alone
from redrafter.targets import Target

LOOKUP = 10
"""Tokens that transformers' prompt lookup drafts, as its documentation suggests."""


@dataclass(frozen=True)
class TargetSetup:
    """The target, and the model folder for engines that load the weights themselves."""

    target: Target
    folder: str  # the same weights
    runtime: str
    exact: str = "auto"


Maker = Callable[[TargetSetup, str, str, Shape | None], Contender]
"""Takes the setup, the contender's name in the results, the text after `=`, and the shape."""


def _engine(setup: TargetSetup, drafter: Any, shape: Shape | None) -> Engine:
    return Engine(setup.target, drafter, shape=shape, runtime=setup.runtime, exact=setup.exact)  # type: ignore[arg-type]


def _kind(drafter: Any) -> str:
    return str(getattr(drafter, "name", type(drafter).__name__))


def _plain(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    return Ours(name, _engine(setup, NoDrafter(), None))


def _drafter(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    """Load a drafter from a folder, or one that needs none."""
    kind = name.split()[0]
    alone = kind.removesuffix(WITH_NGRAMS)
    if not of and not stands_alone(alone):
        raise ConfigError(f"the contender {kind} needs a drafter: give {kind}=FOLDER")
    drafter = resolve_drafter((of or alone) + kind.removeprefix(alone), setup.target)
    if of and _kind(drafter) != kind:
        raise ConfigError(f"{of} holds no {kind} drafter but a {_kind(drafter)} one")
    return Ours(name, _engine(setup, drafter, shape))


def _load_theirs(setup: TargetSetup, folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=setup.target.dtype)
    return model.to(setup.target.device).eval()


def _transformers(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    eos = _engine(setup, NoDrafter(), None).eos_tokens()
    options: dict[str, Any] = {}
    if name == "prompt-lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP
    elif name == "assisted":
        if not of:
            raise ConfigError("the contender assisted needs a smaller model: give assisted=FOLDER")
        options["assistant_model"] = _load_theirs(setup, of)
    return Transformers(name, _load_theirs(setup, setup.folder), eos, **options)


def _llama_cpp(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise ConfigError("the contender llama.cpp needs llama-cpp-python: pip install it, or leave it out") from error
    if not of:
        raise ConfigError("the contender llama.cpp needs the model's weights: give llama.cpp=FILE.gguf")
    threads = torch.get_num_threads()
    model = Llama(of, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
    return LlamaCpp(name, model, _engine(setup, NoDrafter(), None).eos_tokens())


MAKERS: dict[str, Maker] = {
    REFERENCE: _plain,
    "transformers": _transformers,
    "prompt-lookup": _transformers,
    "assisted": _transformers,
    "llama.cpp": _llama_cpp,
}
"""How the contenders that are no drafters are made."""


def make(setup: TargetSetup, specs: Sequence[str], shapes: Sequence[Shape]) -> list[Contender]:
    return [MAKERS.get(kind, _drafter)(setup, name, of, shape) for name, kind, of, shape in names_of(specs, shapes)]
