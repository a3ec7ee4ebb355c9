"""Question files as the benchmarks of the field publish them: one JSON object per line."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the questions {path}: {error}") from error
    found = []
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line), number))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
            raise ConfigError(
                f"{path}, line {number}: expected an object with 'turns', 'prompt' or 'conversations' ({error!r})"
            ) from error
    if not found:
        raise ConfigError(f"{path} holds no questions")
    if limit is None or limit >= len(found):
        return found
    return [found[i * len(found) // limit] for i in range(limit)]


def _question(entry: dict[str, Any], number: int) -> Question:
    name = str(entry.get("question_id", number))
    category = str(entry.get("category", "uncategorised"))
    if "turns" in entry:
        return Question((str(entry["turns"][0]), *map(str, entry["turns"][1:])), category, name)
    if "conversations" in entry:
        turn = next(t for t in entry["conversations"] if t["from"] in ("human", "user"))
        return Question((str(turn["value"]),), category, name)
    return Question((str(entry["prompt"]),), category, name)
