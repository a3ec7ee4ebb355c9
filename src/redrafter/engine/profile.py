"""What `redrafter tune` learnt about a target, a drafter and this machine, and where it is kept.

A profile holds measured costs and tokens/step, so that it can say which shape suits a batch of any size, not only
which one was chosen. It is found by what it was measured with; anything else is another combination.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter
from redrafter.drafters.base import NetDrafter
from redrafter.drafters.checkpoint import identity
from redrafter.errors import CacheUnavailable, ConfigError
from redrafter.results import hardware
from redrafter.targets import Target
from redrafter.targets.default import cache_folder
from redrafter.version import __version__

log = logging.getLogger(__name__)

MARGIN = 1.03
"""Guessing must be this much faster than plain decoding to be chosen: less is within the noise of a measurement."""


@dataclass(frozen=True)
class Verified:
    """A whole step that verifies N nodes which cost nothing to guess; N = 0 is plain decoding."""

    batch: int
    nodes: int
    ms: float


@dataclass(frozen=True)
class Drafted:
    """What guessing adds to such a step."""

    batch: int
    width: int
    length: int
    ms: float


@dataclass(frozen=True)
class Guessed:
    """How far guesses of this shape hold."""

    shape: Shape
    temperature: float
    tokens_per_step: float


@dataclass(frozen=True)
class Stepped:
    """A whole step as the engine takes it; without a shape, of plain decoding."""

    batch: int
    shape: Shape | None
    ms: float


@dataclass(frozen=True)
class Choice:
    """What to do with this many rows: a shape, or plain decoding."""

    batch: int
    shape: Shape | None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements and what follows from them. Shapes have their node budget spelled out."""

    key: dict[str, str]
    """What it was measured with: see `key_of`."""
    name: str
    """The target's."""
    temperature: float
    """Whose tokens/step the choice was made by."""
    verified: tuple[Verified, ...] = ()
    drafted: tuple[Drafted, ...] = ()
    guessed: tuple[Guessed, ...] = ()
    stepped: tuple[Stepped, ...] = ()
    choices: tuple[Choice, ...] = ()
    version: str = __version__

    def choose(self, batch: int) -> Shape | None:
        """For the nearest number of rows that was measured; None is plain decoding."""
        nearest = _nearest(batch, [c.batch for c in self.choices])
        return next(c.shape for c in self.choices if c.batch == nearest)

    def tokens_per_step(self, shape: Shape | None) -> float:
        """At the profile's temperature; ConfigError for a shape nobody tried."""
        if shape is None:
            return 1.0
        for row in self.guessed:
            if row.shape == spelled(shape) and row.temperature == self.temperature:
                return row.tokens_per_step
        raise ConfigError(f"the profile knows nothing of W={shape.width}, L={shape.length}, N={shape.budget}")

    def step_ms(self, shape: Shape | None, batch: int) -> float:
        """Measured whole if it was, else expected."""
        batch = _nearest(batch, [v.batch for v in self.verified] + [s.batch for s in self.stepped])
        for row in self.stepped:
            if row.batch == batch and row.shape == (shape and spelled(shape)):
                return row.ms
        return self.expected_ms(shape, batch)

    def expected_ms(self, shape: Shape | None, batch: int) -> float:
        """The drafter's cost and the verification's; of steps measured whole, only plain decoding's is looked at.

        On a GPU costs are those of recorded steps and whole steps are compiled: plain decoding tells how far these are
        apart.
        """
        whole = next((s.ms for s in self.stepped if (s.batch, s.shape) == (batch, None)), None)
        scale = whole / self.priced_ms(None, batch) if whole is not None else 1.0
        return scale * self.priced_ms(shape, batch)

    def priced_ms(self, shape: Shape | None, batch: int) -> float:
        """Without a look at steps that were measured whole."""
        batch = _nearest(batch, [v.batch for v in self.verified])
        if shape is None:
            return self.verify_ms(0, batch)
        for row in self.drafted:
            if (row.batch, row.width, row.length) == (batch, shape.width, shape.length):
                return row.ms + self.verify_ms(shape.budget, batch)
        raise ConfigError(f"the profile knows no cost of W={shape.width}, L={shape.length}")

    def verify_ms(self, nodes: int, batch: int) -> float:
        """Straight lines between what was measured, and on beyond it."""
        known = sorted((v.nodes, v.ms) for v in self.verified if v.batch == batch)
        if len(known) == 1:
            return known[0][1]
        right = next((i for i, (n, _) in enumerate(known) if n >= nodes and i > 0), len(known) - 1)
        (n0, ms0), (n1, ms1) = known[right - 1], known[right]
        return ms0 + (ms1 - ms0) * (nodes - n0) / (n1 - n0)

    def expected(self, shape: Shape | None, batch: int) -> float:
        """Tokens per second, all rows together; without a shape, of plain decoding."""
        return 1000 * batch * self.tokens_per_step(shape) / self.step_ms(shape, batch)

    def fastest(self, batch: int) -> Shape | None:
        """The best of the shapes measured whole, unless plain decoding is as fast."""
        shapes = [s.shape for s in self.stepped if s.batch == batch and s.shape is not None]
        best = max(shapes, key=lambda s: self.expected(s, batch), default=None)
        worth = best is not None and self.expected(best, batch) >= MARGIN * self.expected(None, batch)
        return best if worth else None


def spelled(shape: Shape) -> Shape:
    """With its node budget as a number.

    >>> spelled(Shape(width=2, length=3))
    Shape(width=2, length=3, nodes=6)
    """
    return dataclasses.replace(shape, nodes=shape.budget)


def _nearest(batch: int, measured: list[int]) -> int:
    if not measured:
        raise ConfigError("the profile holds no measurement")
    return min(measured, key=lambda b: (abs(b - batch), b))


def key_of(target: Target, drafter: Drafter, runtime: str) -> dict[str, str]:
    """All that costs and guesses depend on."""
    own = target.model.parameters()
    on_gpu = target.device.type == "cuda"
    replaced = any("forward" in vars(module) for module in target.model.modules())
    return {
        "target": identity(target)["weights"],
        "bytes": str(sum(p.numel() * p.element_size() for p in own)),  # a quantised copy may share its embeddings
        "passes": "replaced" if replaced else "own",  # a user's own model keeps its forward passes
        "drafter": drafter_identity(drafter),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if on_gpu else str(hardware().get("cpu", "cpu")),
        "runtime": runtime_on(target, runtime),
        "threads": "any" if on_gpu else str(torch.get_num_threads()),
    }


def runtime_on(target: Target, runtime: str) -> str:
    """What "auto" stands for; a CPU has only one."""
    if target.device.type != "cuda":
        return "eager"
    return "compiled" if runtime == "auto" else runtime


def drafter_identity(drafter: Drafter) -> str:
    """The same for the same guesses, as far as we know the drafter; else its class."""
    if isinstance(drafter, NetDrafter):
        digest = hashlib.sha256(repr(drafter.net.config).encode())
        for weight in drafter.net.state_dict().values():
            flat = weight.detach().flatten()
            digest.update(flat[:: max(1, len(flat) // 64)].double().cpu().numpy().tobytes())
        return f"{drafter.name} {digest.hexdigest()[:16]}"
    if isinstance(drafter, ModelDrafter):
        return f"model {identity(drafter.model)['weights']}"
    if isinstance(drafter, NgramDrafter):
        return f"ngram {drafter.shortest}-{drafter.longest}"
    return f"{type(drafter).__module__}.{type(drafter).__qualname__}"


def folder() -> Path:
    return cache_folder() / "profiles"


def path_of(name: str, key: dict[str, str]) -> Path:
    readable = re.sub(r"[^\w.-]+", "-", name)[-60:]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder() / f"{readable}-{digest[:16]}.json"


def save(profile: Profile) -> Path:
    """All or nothing; takes the place of an older profile of the same combination."""
    path = path_of(profile.name, profile.key)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(dataclasses.asdict(profile), indent=1) + "\n")
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        reason = error.strerror or error
        raise CacheUnavailable(
            f"cannot keep the profile in {path.parent} ({reason}); set REDRAFTER_CACHE to a folder you can write"
        ) from error
    return path


def read(path: Path) -> Profile | None:
    """None, with a line in the log, for a file that is damaged or of another version."""
    try:
        content = json.loads(path.read_text())
        if content["version"] != __version__:
            log.warning("%s is of redrafter %s and not used: run redrafter tune again", path, content["version"])
            return None
        profile = Profile(**{name: _parsed(name, value) for name, value in content.items()})
        profile.choose(1)  # a profile without a choice is none
        return profile
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        log.warning("%s is damaged and not used (%s): run redrafter tune again", path, type(error).__name__)
        return None


ROWS: dict[str, type] = {
    "verified": Verified,
    "drafted": Drafted,
    "guessed": Guessed,
    "stepped": Stepped,
    "choices": Choice,
}


def _parsed(name: str, value: Any) -> Any:
    if name not in ROWS:
        return value
    rows = []
    for row in value:
        shape = {"shape": row["shape"] and Shape(**row["shape"])} if "shape" in row else {}
        rows.append(ROWS[name](**(row | shape)))
    return tuple(rows)


def kept() -> Iterator[Profile]:
    """All that can be read."""
    for path in sorted(folder().glob("*.json")):
        if (profile := read(path)) is not None:
            yield profile


def find(target: Target, drafter: Drafter, runtime: str) -> Profile | None:
    """The profile of just this combination, if it was tuned here."""
    try:
        if not any(folder().glob("*.json")):  # the usual case: spare the fingerprints
            return None
    except OSError:
        return None
    key = key_of(target, drafter, runtime)
    profile = read(path_of(target.name, key))
    if profile is not None and profile.key != key:
        log.warning("%s was measured with something else and is not used", path_of(target.name, key))
        return None
    return profile


def tuned(target: Target, drafter: Drafter, runtime: str) -> tuple[Drafter, Shape | None]:
    """What the profile says about one row: the drafter with a shape, or no drafter; as they are without a profile."""
    if isinstance(drafter, NoDrafter) or (profile := find(target, drafter, runtime)) is None:
        return drafter, None
    shape = profile.choose(1)
    if shape is None:
        log.info("plain decoding: redrafter tune found it the fastest here; give a shape to guess all the same")
        return NoDrafter(), None
    log.debug("tuned for this machine: W=%d, L=%d, N=%d", shape.width, shape.length, shape.budget)
    return drafter, shape
