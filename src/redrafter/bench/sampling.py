"""Verification inside real decoding: how long it takes, what is accepted, how good the texts are.

Every way decodes the same prompts with the same drafter through the engine's own step; only the verification of the
drafted chain differs, and a clock stands around that call alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from redrafter.bench.verification import Case, Found, bytes_moved, ways
from redrafter.config import Gamma, RuleConfig, Shape
from redrafter.core.accept import Accepted
from redrafter.core.rules import RejectionRule, SampledSearch, Search
from redrafter.core.tree import Tree

GAMMAS = (3, 5, 10, 15)
SCALES = (1e1, 1e3, 1e4, 1e5)
"""The paper's Tables 8, 2 and 7."""
FIRST = Gamma(name="heuristic")
"""The paper's gamma, in its other tables."""
LONGEST = 20


_PREPARED: set[Any] = set()
"""Ways that have decoded a text, and kinds of calls that were made."""


@dataclass
class Tally:
    """What one way did, over all texts so far."""

    spans: list[Any] = field(default_factory=list)  # seconds, or pairs of CUDA events
    accepted: list[Tensor] = field(default_factory=list)  # (B,) of each call
    drafted: list[Tensor] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)  # a row's bytes: all accepted, refused
    wall: float = 0.0
    peak: int = 0

    def prepare(self, action: Callable[[], Found], kind: tuple[Any, ...]) -> None:
        """A call of a new kind compiles its kernels first, which is no part of what is measured."""
        if kind in _PREPARED:
            return
        began = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        _PREPARED.add(kind)
        self.wall -= time.perf_counter() - began

    def timed(self, action: Callable[[], Found], device: torch.device) -> Found:
        if device.type != "cuda":
            began = time.perf_counter()
            found = action()
            self.spans.append(time.perf_counter() - began)
            return found
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        found = action()
        end.record()
        self.spans.append((start, end))
        return found

    def seconds(self) -> list[float]:
        if self.spans and isinstance(self.spans[0], tuple):
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in self.spans]
        return self.spans

    def row(self) -> dict[str, Any]:
        spans = self.seconds()
        pairs = zip(self.accepted, self.drafted, self.moved, strict=True)
        moved = sum(all_ * int((n >= g).sum()) + refused * int((n < g).sum()) for n, g, (all_, refused) in pairs)
        drafted = sum(int(g.sum()) for g in self.drafted)
        return {
            "calls": len(spans),
            "profiling_seconds": sum(spans),
            "call_microseconds": statistics.fmean(spans) * 1e6,
            "call_deviation": statistics.pstdev(spans) * 1e6,
            "wall_seconds": self.wall,
            "acceptance": sum(int(n.sum()) for n in self.accepted) / max(drafted, 1),
            "bytes": moved,
            "bytes_per_second": moved / max(sum(spans), 1e-9),
            "peak_memory_bytes": self.peak or None,
        }


@dataclass(frozen=True)
class JudgedRule(RejectionRule):
    """The rejection rule with another verification, under a clock."""

    way: str = "fused"
    verify: Callable[[Case], Found] | None = None
    tally: Tally = field(default_factory=Tally)

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        assert isinstance(search, SampledSearch)
        if not tree.length:  # the prompt's own token
            return super().accept(search, tree, logits, counts)
        assert tree.draft_logits is not None
        assert self.verify is not None
        verify, guessed = self.verify, tree.valid.sum(1) - 1
        temperature = search.sampling.temperature
        heat = float(temperature[0])
        rows = (guessed, search.seeds, search.positions, temperature, heat)
        case = Case(logits, tree.draft_logits, tree.tokens[:, 1:], *rows)
        gamma, vocab, size = tree.length, logits.shape[-1], logits.element_size()
        self.tally.prepare(lambda: verify(case), (self.way, *case.draft.shape, *case.target.stride(), size))
        new, accepted = self.tally.timed(lambda: verify(case), logits.device)
        self.tally.accepted.append(accepted)
        self.tally.drafted.append(guessed)
        both = [bytes_moved(self.way, gamma, vocab, size, heat, refused) for refused in (False, True)]
        self.tally.moved.append((both[0], both[1]))
        new = torch.nn.functional.pad(new, (0, gamma + 1 - new.shape[1]))  # transformers' own is as long as it is
        path = torch.arange(gamma + 1, device=new.device).expand_as(new)
        return Accepted(path, new, count=accepted + 1, drafted=accepted, nodes=guessed)


class Task(Protocol):
    """Texts to write and how good they are."""

    metric: str
    scale: tuple[float, float]

    def __len__(self) -> int:
        """How many texts there are."""

    def write(
        self, index: int, rule: Callable[[Shape, int], RejectionRule], shape: Shape, gamma: Gamma, seed: int
    ) -> str:
        """One text, under the rule made for its shape and vocabulary."""

    def score(self, texts: Sequence[tuple[int, str]]) -> float:
        """Over these, each with its index."""


@dataclass(frozen=True)
class Part:
    """One table's worth: these ways, this gamma, this many texts."""

    table: str
    ways: dict[str, Callable[[Case], Found]]
    gamma: Gamma
    length: int
    texts: int
    samples: int = 1  # of each, with other seeds
    about: dict[str, Any] = field(default_factory=dict)


def parts(task: Task, texts: int, fewer: int, samples: int = 1) -> list[Part]:
    every = ways(task.scale)
    main = Part("1, 5, 6", every, FIRST, LONGEST, texts, samples, {"gamma": "heuristic"})
    by_gamma = [Part("8", every, Gamma(), g, fewer, about={"gamma": g}) for g in GAMMAS]
    by_scale = []
    for scale in SCALES:
        alone = {"baseline": every["baseline"], "sigmoid_lossy": ways((-scale, scale))["sigmoid_lossy"]}
        by_scale.append(Part("2, 7", alone, FIRST, LONGEST, fewer, about={"gamma": "heuristic", "scale": scale}))
    return [main, *by_gamma, *by_scale]


def total(task: Task, part: Part) -> int:
    """Texts that each way of it writes."""
    return min(part.texts, len(task)) * part.samples


def quality(task: Task, texts: Sequence[tuple[int, str]]) -> dict[str, float | None]:
    """The texts' score and its standard error, by what it would be without each of them; of one text there is none.

    Several samples of a prompt count as texts of their own: the error is that of sampling, not of the prompts' choice.
    """
    score = {task.metric: task.score(texts), f"{task.metric}_error": None}
    if len(texts) > 1:
        without = [task.score([*texts[:i], *texts[i + 1 :]]) for i in range(len(texts))]
        score[f"{task.metric}_error"] = ((len(texts) - 1) * statistics.pvariance(without)) ** 0.5
    return score


def measure(task: Task, part: Part, seed: int = 0) -> Iterator[list[dict[str, Any]] | None]:
    """None after each text; at the end a row for each way. Ways take turns, another one first at each text.

    Whoever is first meets new lengths first, and pays for whatever is made at their first use.
    """
    tallies = {name: Tally() for name in part.ways}
    written: dict[str, list[tuple[int, str]]] = {name: [] for name in part.ways}
    shape = Shape(width=1, length=part.length)
    config = RuleConfig(name="rejection")
    cuda = torch.cuda.is_available()

    def decode(index: int, name: str, tally: Tally, seed: int = seed) -> str:
        def rule(own: Shape, vocab: int) -> RejectionRule:
            return JudgedRule(config, own, vocab, name, part.ways[name], tally)

        torch.manual_seed(seed)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        text = task.write(index, rule, shape, part.gamma, seed)
        if cuda:
            torch.cuda.synchronize()
            tally.peak = max(tally.peak, torch.cuda.max_memory_allocated())
        tally.wall += time.perf_counter() - began
        return text

    for place, name in enumerate(part.ways):
        if place == 0 or name not in _PREPARED:  # a new gamma warms up once, for all ways; each way once in all
            decode(0, name, Tally())
            _PREPARED.add(name)
    names = list(tallies)
    for turn in range(total(task, part)):
        index, first = turn % min(part.texts, len(task)), turn % len(names)
        for name in names[first:] + names[:first]:
            written[name].append((index, decode(index, name, tallies[name], seed + turn)))
        yield None
    rows: list[dict[str, Any]] = []
    for name, tally in tallies.items():
        about = {"table": part.table, "way": name, "lossless": name != "sigmoid_lossy", "texts": len(written[name])}
        rows.append(about | part.about | quality(task, written[name]) | tally.row())
    for row in rows:
        for what in ("profiling_seconds", "wall_seconds", "call_microseconds"):
            short = what.rpartition("_")[0]
            row[f"{short}_reduction"] = 1 - row[what] / rows[0][what]
    yield rows


def headline(rows: Sequence[dict[str, Any]], metric: str) -> dict[str, float]:
    """The first table's figures."""
    found = {}
    for row in rows:
        if row["table"].startswith("1"):
            found[f"{row['way']}_{metric}"] = row[metric]
            if row[f"{metric}_error"] is not None:
                found[f"{row['way']}_{metric}_error"] = row[f"{metric}_error"]
            found[f"{row['way']}_acceptance"] = row["acceptance"]
            if row["way"] != "baseline":
                found[f"{row['way']}_profiling_reduction"] = row["profiling_reduction"]
                found[f"{row['way']}_wall_reduction"] = row["wall_reduction"]
    return {name: round(value, 4) for name, value in found.items()}
