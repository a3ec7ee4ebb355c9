"""From what a user writes on the command line, `medusa=FOLDER@4x4:7`, to contenders."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redrafter.bench.contenders import REFERENCE, Contender, LlamaCpp, Ours, Transformers
from redrafter.config import Shape
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.drafters.load import load_drafter
from redrafter.engine import Engine
from redrafter.engine.resolve import resolve_drafter
from redrafter.errors import ConfigError
from redrafter.targets import Target

LOOKUP = 10
"""Tokens that transformers' prompt lookup drafts, as its documentation suggests."""


@dataclass(frozen=True)
class TargetSetup:
    """The target, and the model folder for engines that load the weights themselves."""

    target: Target
    folder: str  # the same weights
    runtime: str


Maker = Callable[[TargetSetup, str, str, Shape | None], Contender]
"""Takes the setup, the contender's name in the results, the text after `=`, and the shape."""


def _engine(setup: TargetSetup, drafter: Any, shape: Shape | None) -> Engine:
    return Engine(setup.target, drafter, shape=shape, runtime=setup.runtime)  # type: ignore[arg-type]


def _kind(drafter: Any) -> str:
    return str(getattr(drafter, "name", type(drafter).__name__))


def _plain(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    return Ours(name, _engine(setup, NoDrafter(), None))


def _ngram(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    return Ours(name, _engine(setup, NgramDrafter(), shape))


def _recurrent(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    drafter = load_drafter(Path(of), setup.target) if of else resolve_drafter("auto", setup.target)
    if _kind(drafter) != "recurrent":
        raise ConfigError(f"no recurrent drafter comes with the package for {setup.target.name}: give recurrent=FOLDER")
    return Ours(name, _engine(setup, drafter, shape))


def _peer(setup: TargetSetup, name: str, of: str, shape: Shape | None) -> Contender:
    """Load medusa, eagle or a detached draft model from a folder."""
    kind = name.split()[0]
    if not of:
        raise ConfigError(f"the contender {kind} needs a drafter: give {kind}=FOLDER")
    drafter = resolve_drafter(of, setup.target)
    if _kind(drafter) != kind:
        raise ConfigError(f"{of} holds no {kind} drafter but a {_kind(drafter)} one")
    return Ours(name, _engine(setup, drafter, shape))


def _load_theirs(setup: TargetSetup, folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=setup.target.dtype)
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


MAKERS: dict[str, tuple[Maker, str]] = {
    REFERENCE: (_plain, "our plain decoding, which the others are compared with"),
    "recurrent": (_recurrent, "the recurrent drafter (=FOLDER, else the one that comes with the package)"),
    "medusa": (_peer, "Medusa, of `redrafter train --drafter medusa` (=FOLDER)"),
    "eagle": (_peer, "EAGLE, of `redrafter train --drafter eagle` (=FOLDER)"),
    "ngram": (_ngram, "our prompt lookup"),
    "model": (_peer, "a detached smaller model as our drafter (=FOLDER)"),
    "transformers": (_transformers, "transformers' generate"),
    "prompt-lookup": (_transformers, "transformers' generate with prompt lookup"),
    "assisted": (_transformers, "transformers' assisted generation (=FOLDER of a smaller model)"),
    "llama.cpp": (_llama_cpp, "llama.cpp, if llama-cpp-python is installed (=FILE.gguf)"),
}
SHAPED = ("recurrent", "medusa", "eagle", "ngram", "model")
"""Contenders that a grid of shapes multiplies."""


def split_shape(spec: str) -> tuple[str, Shape | None]:
    """
    >>> split_shape("ngram@1x7"), split_shape("model=a@b")
    (('ngram', Shape(width=1, length=7, nodes=None)), ('model=a@b', None))
    """
    match = re.fullmatch(r"(.*)@(\d+x\d+(?::\d+)?)", spec)
    return (match[1], Shape.of(match[2])) if match else (spec, None)


def names_of(specs: Sequence[str], shapes: Sequence[Shape]) -> list[tuple[str, str, str, Shape | None]]:
    """(name in the results, kind, what stands behind `=`, shape) of every contender; plain is always the first.

    A shape of its own, behind `@`, takes a contender out of the grid.

    >>> [n for n, *_ in names_of(["ngram", "plain"], [Shape(width=1, length=3), Shape(width=2, length=3)])]
    ['plain', 'ngram 1x3:3', 'ngram 2x3:6']
    >>> names_of(["medusa=my/folder@4x4:7"], [Shape()])[1]
    ('medusa', 'medusa', 'my/folder', Shape(width=4, length=4, nodes=7))
    """
    found: list[tuple[str, str, str, Shape | None]] = [(REFERENCE, REFERENCE, "", None)]
    for whole in specs:
        spec, own = split_shape(whole)
        kind, _, of = spec.partition("=")
        if kind not in MAKERS:
            raise ConfigError(f"no contender {kind!r}: use some of {', '.join(MAKERS)}")
        if kind == REFERENCE:
            continue
        if own is not None:
            if kind not in SHAPED:
                raise ConfigError(f"the contender {kind} has no beam: leave @{own.label} out")
            found.append((kind, kind, of, own))
        elif kind in SHAPED and shapes:
            found += [(f"{kind} {s.label}" if len(shapes) > 1 else kind, kind, of, s) for s in shapes]
        else:
            found.append((kind, kind, of, None))
    for name in {n for n, *_ in found}:
        if sum(n == name for n, *_ in found) > 1:
            raise ConfigError(f"the contender {name} is named twice")
    return found


def make(setup: TargetSetup, specs: Sequence[str], shapes: Sequence[Shape]) -> list[Contender]:
    return [MAKERS[kind][0](setup, name, of, shape) for name, kind, of, shape in names_of(specs, shapes)]
