"""What can be set for the plug-in: a JSON object in the environment variable REDRAFTER_SGLANG.

SGLang's command line takes no arguments of plug-ins, and it reads `--speculative-draft-model-path` as a model of
transformers, which a drafter's folder is not.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from redrafter.bounds import Name, check
from redrafter.config import Shape, require
from redrafter.errors import ConfigError
from redrafter.interop.find import WITH_NGRAMS

VARIABLE = "REDRAFTER_SGLANG"
EXAMPLE = '{"drafter": "my-drafter+ngram"}'
NODES = 64
"""Nodes of the largest tree, its root included, unless the user gives a number or a shape."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields of the JSON object in REDRAFTER_SGLANG."""

    drafter: Name = "auto"
    """`auto` (`recurrent+ngram`), `recurrent` (the drafter that comes with the package for this model), or a folder or
    Hub id of a recurrent drafter. `+ngram` at the end mixes the text's n-grams into the tree."""
    rule: Literal["seeded", "sglang"] = "seeded"
    """`seeded`: a seed gives the same text with and without speculation. `sglang`: SGLang's own rule."""
    shape: str = ""
    """Beam of the largest tree, such as 16x5. The tree's nodes are `--speculative-num-draft-tokens` (64)."""
    adaptive: bool = True
    """Draft less, or nothing, where measured step times say that this is faster."""
    graphs: bool = True
    """Record drafting as CUDA graphs."""
    host_lengths: bool = False
    """Copy the requests' lengths to the host in every step, for attention backends that need it."""

    def __post_init__(self) -> None:
        check(self)
        if self.shape:
            Shape.of(self.shape)

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        text = environ.get(VARIABLE, "") or "{}"
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE} must hold a JSON object such as {EXAMPLE}, got {text!r}: {error}") from None
        require(isinstance(given, dict), f"{VARIABLE} must hold a JSON object such as {EXAMPLE}, got {text!r}")
        known = {f.name for f in fields(cls)}
        unknown = sorted(given.keys() - known)
        require(not unknown, f"{VARIABLE} has no {unknown}; it takes {sorted(known)}")
        return cls(**given)

    def nodes(self, asked: int | None) -> int:
        """Nodes of the largest tree, its root included; `asked` is `--speculative-num-draft-tokens`."""
        require(asked is None or asked >= 2, "--speculative-num-draft-tokens counts the tree's root: give 2 or more")
        if not self.shape:
            return NODES if asked is None else asked
        beam = Shape.of(self.shape)
        most = beam.width * beam.length + 1
        require(
            asked is None or asked <= most,
            f"the shape {self.shape} has at most {most} nodes with the root, but --speculative-num-draft-tokens is "
            f"{asked}; give {most} or fewer, or a larger shape",
        )
        return beam.budget + 1 if asked is None else asked

    @property
    def ngrams(self) -> bool:
        return self.drafter == "auto" or self.drafter.endswith(WITH_NGRAMS)

    @property
    def folder(self) -> str:
        """The drafter's name without `+ngram`."""
        return "recurrent" if self.drafter == "auto" else self.drafter.removesuffix(WITH_NGRAMS)
