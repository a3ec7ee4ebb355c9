"""Export of answers in the file formats of Spec-Bench (for its speed scripts) and FastChat (for its judges)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redrafter.bench.runs import digest
from redrafter.bench.statistics import Record, contenders


def export(folder: Path, records: Sequence[Record], model: str, stamp: float) -> list[Path]:
    """Write the folders `spec_bench/` and `fastchat/`, with one file per contender and temperature."""
    written = []
    for temperature in dict.fromkeys(r["temperature"] for r in records):
        for name in contenders(records):
            own = [r for r in records if (r["contender"], r["temperature"]) == (name, temperature)]
            model_id = f"{model}-{name.replace(' ', '-').replace(':', '-')}-temp-{temperature:g}"
            for kind, line in (("spec_bench", spec_bench), ("fastchat", fastchat)):
                path = folder / kind / f"{model_id}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                lines = [line(turns, model_id, stamp) for turns in by_question(own)]
                path.write_text("".join(json.dumps(entry) + "\n" for entry in lines), encoding="utf-8")
                written.append(path)
    return written


def by_question(records: Sequence[Record]) -> list[list[Record]]:
    """Return the turns of each question, in order."""
    names = dict.fromkeys(r["question"] for r in records)
    return [sorted((r for r in records if r["question"] == name), key=lambda r: r["turn"]) for name in names]


def spec_bench(turns: Sequence[Record], model_id: str, stamp: float) -> dict[str, Any]:
    """Return a line for Spec-Bench's speed.py. `accept_lengths` are tokens per step, including the target's own."""
    choice = {
        "index": 0,
        "turns": [r["text"] for r in turns],
        "decoding_steps": [len(r["accepted"]) + 1 for r in turns],
        "new_tokens": [r["tokens"] for r in turns],
        "wall_time": [r["seconds"] for r in turns],
        "accept_lengths": [n + 1 for r in turns for n in r["accepted"]],
    }
    return _answer(turns[0], model_id, stamp) | {"category": turns[0]["category"], "choices": [choice]}


def fastchat(turns: Sequence[Record], model_id: str, stamp: float) -> dict[str, Any]:
    """Return a line for FastChat's judges."""
    choice = {"index": 0, "turns": [r["text"] for r in turns]}
    return _answer(turns[0], model_id, stamp) | {"choices": [choice]}


def _answer(record: Record, model_id: str, stamp: float) -> dict[str, Any]:
    name: str = record["question"]
    return {
        "question_id": int(name) if name.isdigit() else name,
        "answer_id": digest([name, model_id, record["hash"]]),
        "model_id": model_id,
        "tstamp": stamp,
    }
