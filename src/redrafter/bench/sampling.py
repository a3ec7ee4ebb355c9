"""Comparison of verification methods in real decoding: time, acceptance and quality of the texts.

Every method decodes the same prompts with the same drafter through the engine's own step. Only the verification of the
drafted chain differs, and only that call is timed.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from redrafter.bench.verification import Case, Verified, bytes_moved, methods
from redrafter.config import Gamma, RuleConfig, Shape
from redrafter.core.accept import Accepted
from redrafter.core.rules import RejectionRule, SampledSearch, Search
from redrafter.core.tree import Tree

GAMMAS = (3, 5, 10, 15)
SCALES = (1e1, 1e3, 1e4, 1e5)
"""The paper's Tables 8, 2 and 7."""
FIRST = Gamma(name="heuristic")
"""The paper's gamma in its other tables."""
LONGEST = 20


_PREPARED: set[Any] = set()
"""Methods that are warmed up, and the shapes of verification calls whose kernels are compiled."""


@dataclass
class CallTimes:
    """Times, accepted tokens and memory of one method over all texts so far."""

    spans: list[Any] = field(default_factory=list)  # seconds, or pairs of CUDA events
    accepted: list[Tensor] = field(default_factory=list)  # (B,) of each call
    drafted: list[Tensor] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)  # bytes per row: all accepted, one rejected
    wall: float = 0.0
    peak: int = 0

    def prepare(self, action: Callable[[], Verified], kind: tuple[Any, ...]) -> None:
        """Compile the kernels of a new kind of call, and leave that time out of the measurement."""
        if kind in _PREPARED:
            return
        began = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        _PREPARED.add(kind)
        self.wall -= time.perf_counter() - began

    def timed(self, action: Callable[[], Verified], device: torch.device) -> Verified:
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
        moved = sum(all_ * int((n >= g).sum()) + rejected * int((n < g).sum()) for n, g, (all_, rejected) in pairs)
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
class TimedRule(RejectionRule):
    """The rejection rule with another verification method, which is timed."""

    method: str = "fused"
    verify: Callable[[Case], Verified] | None = None
    times: CallTimes = field(default_factory=CallTimes)

    def accept(self, search: Search, tree: Tree, logits: Tensor, counts: Tensor | None) -> Accepted:
        assert isinstance(search, SampledSearch)
        if not tree.length:  # the first token, from the prompt
            return super().accept(search, tree, logits, counts)
        assert tree.draft_logits is not None
        assert self.verify is not None
        verify, drafted = self.verify, tree.valid.sum(1) - 1
        temperature = search.sampling.temperature
        heat = float(temperature[0])
        rows = (drafted, search.seeds, search.positions, temperature, heat)
        case = Case(logits, tree.draft_logits, tree.tokens[:, 1:], *rows)
        gamma, vocab, size = tree.length, logits.shape[-1], logits.element_size()
        self.times.prepare(lambda: verify(case), (self.method, *case.draft.shape, *case.target.stride(), size))
        new, accepted = self.times.timed(lambda: verify(case), logits.device)
        self.times.accepted.append(accepted)
        self.times.drafted.append(drafted)
        both = [bytes_moved(self.method, gamma, vocab, size, heat, rejected) for rejected in (False, True)]
        self.times.moved.append((both[0], both[1]))
        new = torch.nn.functional.pad(
            new, (0, gamma + 1 - new.shape[1])
        )  # transformers returns fewer tokens after a rejection
        path = torch.arange(gamma + 1, device=new.device).expand_as(new)
        return Accepted(path, new, count=accepted + 1, drafted=accepted, nodes=drafted)


class TextTask(Protocol):
    """A set of texts to write, and their quality metric."""

    metric: str
    scale: tuple[float, float]

    def __len__(self) -> int:
        """Return the number of texts."""

    def write(
        self, index: int, rule: Callable[[Shape, int], RejectionRule], shape: Shape, gamma: Gamma, seed: int
    ) -> str:
        """Write one text with the rule that `rule` makes from the shape and the vocabulary size."""

    def score(self, texts: Sequence[tuple[int, str]]) -> float:
        """Return the metric over texts, each given with its index."""


@dataclass(frozen=True)
class TableSpec:
    """The settings of one table: methods, gamma and number of texts."""

    table: str
    methods: dict[str, Callable[[Case], Verified]]
    gamma: Gamma
    length: int
    texts: int
    samples: int = 1  # per text, with different seeds
    about: dict[str, Any] = field(default_factory=dict)


def tables(task: TextTask, texts: int, fewer: int, samples: int = 1) -> list[TableSpec]:
    all_methods = methods(task.scale)
    main = TableSpec("1, 5, 6", all_methods, FIRST, LONGEST, texts, samples, {"gamma": "heuristic"})
    by_gamma = [TableSpec("8", all_methods, Gamma(), g, fewer, about={"gamma": g}) for g in GAMMAS]
    by_scale = []
    for scale in SCALES:
        alone = {"baseline": all_methods["baseline"], "sigmoid_lossy": methods((-scale, scale))["sigmoid_lossy"]}
        by_scale.append(TableSpec("2, 7", alone, FIRST, LONGEST, fewer, about={"gamma": "heuristic", "scale": scale}))
    return [main, *by_gamma, *by_scale]


def total(task: TextTask, part: TableSpec) -> int:
    """Return the number of texts that each method writes."""
    return min(part.texts, len(task)) * part.samples


def quality(task: TextTask, texts: Sequence[tuple[int, str]]) -> dict[str, float | None]:
    """Return the score of the texts and its jackknife standard error (None for a single text).

    Several samples of one prompt count as separate texts: the error is that of sampling, not of the choice of prompts.
    """
    score = {task.metric: task.score(texts), f"{task.metric}_error": None}
    if len(texts) > 1:
        without = [task.score([*texts[:i], *texts[i + 1 :]]) for i in range(len(texts))]
        score[f"{task.metric}_error"] = ((len(texts) - 1) * statistics.pvariance(without)) ** 0.5
    return score


def measure(task: TextTask, part: TableSpec, seed: int = 0) -> Iterator[list[dict[str, Any]] | None]:
    """Yield None after each text, and at the end a row per method. Methods take turns.

    Another method is first at each text, because the first one pays for the initialisation of new lengths.
    """
    timings = {name: CallTimes() for name in part.methods}
    written: dict[str, list[tuple[int, str]]] = {name: [] for name in part.methods}
    shape = Shape(width=1, length=part.length)
    config = RuleConfig(name="rejection")
    cuda = torch.cuda.is_available()

    def decode(index: int, name: str, times: CallTimes, seed: int = seed) -> str:
        def rule(own: Shape, vocab: int) -> RejectionRule:
            return TimedRule(config, own, vocab, name, part.methods[name], times)

        torch.manual_seed(seed)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        text = task.write(index, rule, shape, part.gamma, seed)
        if cuda:
            torch.cuda.synchronize()
            times.peak = max(times.peak, torch.cuda.max_memory_allocated())
        times.wall += time.perf_counter() - began
        return text

    for place, name in enumerate(part.methods):
        if place == 0 or name not in _PREPARED:  # warm up once per gamma, and once per method
            decode(0, name, CallTimes())
            _PREPARED.add(name)
    names = list(timings)
    for turn in range(total(task, part)):
        index, first = turn % min(part.texts, len(task)), turn % len(names)
        for name in names[first:] + names[:first]:
            written[name].append((index, decode(index, name, timings[name], seed + turn)))
        yield None
    rows: list[dict[str, Any]] = []
    for name, times in timings.items():
        about = {"table": part.table, "way": name, "lossless": name != "sigmoid_lossy", "texts": len(written[name])}
        rows.append(about | part.about | quality(task, written[name]) | times.row())
    for row in rows:
        for what in ("profiling_seconds", "wall_seconds", "call_microseconds"):
            short = what.rpartition("_")[0]
            row[f"{short}_reduction"] = 1 - row[what] / rows[0][what]
    yield rows


def headline(rows: Sequence[dict[str, Any]], metric: str) -> dict[str, float]:
    """Return the figures of the first table."""
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
