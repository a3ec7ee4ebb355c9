"""The journal of a training run: one JSON object a line, mirrored to TensorBoard where it is installed.

A training line is `{"update", "loss", "accuracy": [by depth], "lr", "positions_per_second", "seconds"}`; an evaluation
is `{"update", "held_out": {"tokens_per_step", "accuracy": [by depth], "loss"}}`. Further names are kept as they come.
"""

import functools
import importlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

log = logging.getLogger(__name__)

Record = dict[str, Any]
NAME = "journal.jsonl"


@runtime_checkable
class Watcher(Protocol):
    """Told what happens; a terminal's display, for instance."""

    def training(self, record: Record) -> None: ...
    def held_out(self, record: Record) -> None: ...
    def note(self, text: str) -> None: ...
    def planned(self, updates: int) -> None: ...


class Journal:
    """Appends to the journal in `folder`; opened with `after`, it forgets what came after that update.

    A run resumed from a checkpoint at update 500 does updates 501 and on once more, so their first lines go.
    `after=0` is a run from the beginning: nothing is kept.
    """

    def __init__(self, folder: Path | str, after: int = 0) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.records: list[Record] = [r for r in read_journal(folder) if after and r["update"] <= after]
        path = folder / NAME
        scratch = path.with_name(path.name + ".part")
        scratch.write_text("".join(map(line, self.records)), encoding="utf-8")
        scratch.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._board = board(folder / "tensorboard", after)

    def write(self, record: Mapping[str, Any]) -> None:
        kept: Record = finite(dict(record))
        self._file.write(line(kept))
        self._file.flush()  # a killed process loses at most the line it was writing
        self.records.append(kept)
        if self._board is not None:
            for tag, value in scalars(kept):
                self._board.add_scalar(tag, value, kept["update"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_journal(folder: Path | str) -> list[Record]:
    """All whole lines of the journal in `folder`; none if there is no journal yet."""
    path = Path(folder) / NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found: list[Record] = []
    for number, text in enumerate(lines, start=1):
        if not text:
            continue
        try:
            record = json.loads(text)
            record["update"] += 0  # a line without its update has no place on any curve
            found.append(finite(record))
        except (ValueError, TypeError, KeyError):
            # The last line is cut short when a run is killed: nothing to speak of. Any other should not happen.
            log.log(logging.DEBUG if number == len(lines) else logging.WARNING, "%s:%d is no record", path, number)
    return found


def best(records: Iterable[Record]) -> tuple[int, float] | None:
    """The update with the most tokens/step on held-out text, and how many; the first such update on a tie."""
    found = None
    for record in records:
        value = record.get("held_out", {}).get("tokens_per_step")
        if value is not None and math.isfinite(value) and (found is None or value > found[1]):
            found = (record["update"], value)
    return found


def line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON does not have.

    >>> finite({"loss": float("nan"), "accuracy": [0.5, float("inf")]})
    {'loss': None, 'accuracy': [0.5, None]}
    """
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Each number of a record under TensorBoard's name for it.

    >>> dict(scalars({"update": 3, "accuracy": [0.6, 0.4], "held_out": {"loss": 2.0}}))
    {'training/accuracy/depth_1': 0.6, 'training/accuracy/depth_2': 0.4, 'held_out/loss': 2.0}
    """
    for name, value in record.items():
        if name == "held_out":
            yield from flat(name, value)
        elif name != "update":
            yield from flat(f"training/{name}", value)


def flat(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(f"{tag}/{name}", inner)
    elif isinstance(value, list):
        for depth, inner in enumerate(value, start=1):
            yield from flat(f"{tag}/depth_{depth}", inner)
    elif isinstance(value, int | float):
        yield tag, float(value)


def board(folder: Path, after: int) -> Any:
    """A SummaryWriter that hides what earlier event files say past `after`, or None without TensorBoard."""
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        say_how_to_get_it()
        return None
    return module.SummaryWriter(str(folder), purge_step=after + 1 if after else 0, flush_secs=30)


@functools.cache
def say_how_to_get_it() -> None:
    """Once a process: a sweep opens many journals."""
    log.info("no TensorBoard files are written; `pip install tensorboard` would add them")
