"""Contenders by the names that a user writes on the command line, such as `medusa=FOLDER@4x4:7`.

The command line reads this file for its help texts, so it imports neither torch nor transformers.
"""

import re
from collections.abc import Sequence

from redrafter.config import Shape
from redrafter.drafters import registry
from redrafter.errors import ConfigError
from redrafter.interop.find import WITH_NGRAMS

REFERENCE = "plain"
"""The contender that all others are compared with."""
_DRAFTERS = {name: entry for name, entry in registry.ENTRIES.items() if name != "none"}
FOLDERS = {
    (False, False): " (=FOLDER, else the one that comes with the package)",
    (False, True): " (=FOLDER of such a drafter)",
    (True, False): "",
}
"""Whether a drafter is not trained, and has no name alone -> what its contender takes."""
CONTENDERS = {
    REFERENCE: "our plain decoding, which the others are compared with",
    **{name: entry.about + FOLDERS[entry.kind is None, entry.make is None] for name, entry in _DRAFTERS.items()},
    "model": "a detached smaller model as our drafter (=FOLDER)",
    "transformers": "transformers' generate",
    "prompt-lookup": "transformers' generate with prompt lookup",
    "assisted": "transformers' assisted generation (=FOLDER of a smaller model)",
    "llama.cpp": "llama.cpp, if llama-cpp-python is installed (=FILE.gguf)",
}
"""Name -> description. Drafters of other packages are contenders, too."""
NETWORKS = (*(name for name in _DRAFTERS if name != "ngram"), "model")
"""Contenders that n-grams can be mixed into: `recurrent+ngram`."""


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
        alone = kind.removesuffix(WITH_NGRAMS)
        others = registry.packages()
        if alone not in {**CONTENDERS, **others} or (kind != alone and alone not in (*NETWORKS, *others)):
            raise ConfigError(f"no contender {kind!r}: use some of {', '.join((*CONTENDERS, *others))}")
        shaped = alone in (*NETWORKS, *_DRAFTERS, *others)  # by a grid of shapes
        if kind == REFERENCE:
            continue
        if own is not None:
            if not shaped:
                raise ConfigError(f"the contender {kind} has no beam: leave @{own.label} out")
            found.append((kind, kind, of, own))
        elif shaped and shapes:
            found += [(f"{kind} {s.label}" if len(shapes) > 1 else kind, kind, of, s) for s in shapes]
        else:
            found.append((kind, kind, of, None))
    for name in {n for n, *_ in found}:
        if sum(n == name for n, *_ in found) > 1:
            raise ConfigError(f"the contender {name} is named twice")
    return found
