"""A benchmark run over a suite. Each turn is written to disk, so that an interrupted run can resume."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from redrafter import results
from redrafter.bench.contenders import Contender, PromptBatch, TimedAnswer
from redrafter.bench.specs import REFERENCE
from redrafter.bench.statistics import Record
from redrafter.bounds import Bounds, Count, NotNegative, check
from redrafter.core.noise import fold
from redrafter.engine import Engine
from redrafter.engine.ties import explain
from redrafter.errors import ConfigError, CorruptCheckpoint
from redrafter.questions import Question

log = logging.getLogger(__name__)

RUN, ANSWERS = "run.json", "answers.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run. Answers are comparable only if all settings and the machine are the same."""

    suite: str
    questions: str
    """Digest of the questions."""
    model: dict[str, str]
    """Name, weights and tokenizer of the target."""
    contenders: tuple[str, ...]
    """Each as given on the command line, with a digest of its weights."""
    shapes: tuple[str, ...] = ()
    temperatures: Annotated[tuple[NotNegative, ...], Bounds(least=1)] = (0.0,)
    max_new_tokens: Count = 128
    batch: Count = 1
    rounds: Count = 1
    """Each question is answered this many times; times are medians per answer."""
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    runtime: str = "auto"

    def __post_init__(self) -> None:
        check(self)


def environment() -> dict[str, Any]:
    """Return the code, versions and hardware that a result depends on."""
    return {
        "commit": results.commit(),
        "code": code_digest(),
        "versions": results.versions(),
        "hardware": results.hardware(),
    }


def code_digest() -> str:
    """Return a digest of the package's source files."""
    root = Path(results.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def digest(value: Any) -> str:
    """Return a digest of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class BenchmarkRun:
    """A folder with `run.json` and `answers.jsonl`. A folder with a run of other settings is refused."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        self.facts = {"config": json.loads(json.dumps(asdict(config))), "environment": environment()}
        self.hash = digest(self.facts)
        self.records: list[Record] = []
        if (folder / RUN).exists():
            before = read_facts(folder)
            if before["hash"] != self.hash:
                raise ConfigError(
                    f"{folder} contains another run ({_difference(before, self.facts)}); choose another folder"
                )
            self.records = read_answers(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"{folder} is neither empty nor a run; choose another folder")
            _write(folder / RUN, json.dumps({"hash": self.hash, "command": results.command(), **self.facts}, indent=1))

    def play(self, contenders: Sequence[Contender], questions: Sequence[Question], engine: Engine) -> Iterator[int]:
        """Answer the remaining questions; yield the number of answers after each turn.

        Contenders take turns at being first. The history of a later turn is the answer of plain decoding, so that all
        contenders get the same prompt. An interrupted turn is repeated by all contenders.
        """
        playing = [c for c in contenders if self.config.batch == 1 or not c.one_row]
        groups = [questions[i : i + self.config.batch] for i in range(0, len(questions), self.config.batch)]
        known = {_key(r) for r in self.records}
        number = 0
        for temperature in self.config.temperatures:
            for group in groups:
                for turn in range(max(len(q.turns) for q in group)):
                    asked = [q for q in group if turn < len(q.turns)]
                    number += 1
                    keys = [(temperature, q.id, turn, c.name) for q in asked for c in playing]
                    if not all(key in known for key in keys):
                        self._turn(playing, number % len(playing), asked, turn, temperature, engine)
                    yield len(self.records)

    def _turn(
        self,
        playing: Sequence[Contender],
        first: int,
        asked: Sequence[Question],
        turn: int,
        temperature: float,
        engine: Engine,
    ) -> None:
        prompts = [engine.encode(self._messages(q, turn, temperature)) for q in asked]
        seeds = [fold(self.config.seed, int(digest(q.id)[:8], 16) + turn) for q in asked]
        batch = PromptBatch(prompts, seeds, temperature, self.config.max_new_tokens)
        answers: dict[str, list[list[TimedAnswer]]] = {c.name: [] for c in playing}
        for _ in range(self.config.rounds):
            for contender in [*playing[first:], *playing[:first]]:
                answers[contender.name].append(contender.answer(batch))
        plain = answers[REFERENCE][0]
        requests = engine.requests(prompts, max_new_tokens=batch.max_new_tokens, temperature=temperature, seed=seeds)
        records: list[Record] = []
        for contender in playing:
            for place, question in enumerate(asked):
                rounds = [a[place] for a in answers[contender.name]]
                one = rounds[0]
                record: Record = {
                    "hash": self.hash,
                    "suite": self.config.suite,
                    "question": question.id,
                    "category": question.category,
                    "turn": turn,
                    "temperature": temperature,
                    "batch": self.config.batch,
                    "rows": len(asked),
                    "contender": contender.name,
                    "prompt_tokens": len(prompts[place]),
                    "tokens": len(one.tokens),
                    "seconds": median(a.seconds for a in rounds),
                    "first_seconds": median(a.first_seconds for a in rounds),
                    "first_tokens": one.first_tokens,
                    "accepted": one.accepted,
                    "equal": None,
                    "exactness": contender.exactness,
                    "text": engine.target.tokenizer.decode(one.tokens, skip_special_tokens=True),
                }
                if contender.seeded or (temperature == 0 and contender.name != "llama.cpp"):
                    difference = explain(engine.target, requests[place], plain[place].tokens, one.tokens)
                    record["equal"] = difference is None
                    if difference is not None:
                        excused = difference.is_tie and not engine.exactness == contender.exactness == "bitwise"
                        record |= {"parts_at": difference.index, "gap": difference.gap, "tie": excused}
                records.append(record)
        with (self.folder / ANSWERS).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(r) + "\n" for r in records))  # the whole turn at once
        keys = {_key(r) for r in records}
        self.records = [r for r in self.records if _key(r) not in keys] + records

    def _messages(self, question: Question, turn: int, temperature: float) -> list[dict[str, str]]:
        messages = []
        for before in range(turn):
            answer = next(r["text"] for r in self.records if _key(r) == (temperature, question.id, before, REFERENCE))
            messages += [{"role": "user", "content": question.turns[before]}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": question.turns[turn]}]


def _key(record: Record) -> tuple[float, str, int, str]:
    return record["temperature"], record["question"], record["turn"], record["contender"]


def read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / RUN).read_text())
        if not {"hash", "config", "environment"} <= set(facts):
            raise ValueError("no hash, config or environment in it")
    except (OSError, ValueError, TypeError) as error:
        raise CorruptCheckpoint(f"{folder} contains no run of `redrafter bench run`: {error}") from error
    return dict(facts)


def read_answers(folder: Path) -> list[Record]:
    """Read all answers of a run, without a last line that was only partly written."""
    path, facts = folder / ANSWERS, read_facts(folder)
    if not path.exists():
        return []
    found: dict[Any, Record] = {}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                log.warning("the last answer in %s is incomplete and will be asked again", path)
                _write(path, "".join(lines[:-1]))
                continue
            raise CorruptCheckpoint(f"{path}, line {number} is damaged: {error}") from error
        if record.get("hash") != facts["hash"]:
            raise CorruptCheckpoint(f"{path}, line {number} belongs to another run ({record.get('hash')})")
        found[_key(record)] = record
    return list(found.values())


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the first setting that differs."""
    for part in ("config", "environment"):
        for name, value in json.loads(json.dumps(now[part])).items():
            old = before[part].get(name)
            if old != value:
                return f"{name} was {old}, now it is {value}"
    return "made by another version"


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
