"""Question files as the benchmarks of the field publish them: one JSON object per line."""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from redrafter.bounds import Bounds, Name, check_value
from redrafter.errors import ConfigError


@dataclass(frozen=True)
class Question:
    """What a user says, turn by turn, with the category it is counted under."""

    turns: tuple[str, ...]
    category: str
    id: str

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Spec-Bench questions (`turns`, `category`), plain `{"prompt"}` lines or ShareGPT conversations; .gz too.

    With a limit, questions spread evenly over the file, so that every category has its share.
    """
    try:
        content = path.read_bytes()
        raw = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read the questions {path}: {error}") from error
    found = []
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line), number))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        except (ValueError, KeyError, TypeError, StopIteration, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: expected an object with 'turns', 'prompt' or 'conversations' ({error!r})"
            ) from error
    if not found:
        raise ConfigError(f"{path} holds no questions")
    if limit is None or limit >= len(found):
        return found
    return [found[i * len(found) // limit] for i in range(limit)]


def _question(entry: Any, number: int) -> Question:
    if not isinstance(entry, dict):
        raise TypeError("it is no object")
    if "turns" in entry:
        turns = entry["turns"]
    elif "conversations" in entry:
        turns = [next(turn for turn in entry["conversations"] if turn["from"] in ("human", "user"))["value"]]
    else:
        turns = [entry["prompt"]]
    check_value("turns", turns, Annotated[list[Name], Bounds(least=1)])
    return Question(tuple(turns), str(entry.get("category", "uncategorised")), str(entry.get("question_id", number)))
