"""Answers that follow JSON schemas: are they valid, and are they those of plain decoding with the same grammar?

    python benchmarks/structured.py
    python benchmarks/structured.py --shape vicuna-7b --rows 1

Each generated schema is answered at T = 0 and T = 1, speculatively and plainly, `--rows` at once. Every answer that
ends by itself is validated. `--without-forced` schemas are answered once more without the grammar's forced tokens.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/structured.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jsonschema_rs
import torch

from benchmarks.common import arguments, parse
from benchmarks.schemas import Schema, make_schema
from benchmarks.smoke import TinyFiles
from benchmarks.widen.load import load_wide
from redrafter.config import Shape
from redrafter.engine import Engine, grammar, load
from redrafter.engine.request import Completion
from redrafter.results import check_new, write_results


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--schemas", 2, "--tokens", 16]
    return [*words, "--rows", 2, "--without-forced", 1]


class Watch:
    """Counts the CPU time that grammars take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given)
            finally:
                self.seconds += time.thread_time() - began

        return measured

    @contextmanager
    def watching(self) -> Iterator[None]:
        guide = grammar.GrammarGuide
        own = guide.guess, guide.__call__
        guide.guess, guide.__call__ = self.timed(own[0]), self.timed(own[1])  # type: ignore[method-assign]
        try:
            yield
        finally:
            guide.guess, guide.__call__ = own  # type: ignore[method-assign]


@contextmanager
def no_forced_tokens() -> Iterator[None]:
    with mock.patch.object(grammar, "DEEPEST", 0):
        yield


def answers(
    engine: Engine, asked: Sequence[tuple[int, str, Schema]], temperature: float, tokens: int
) -> tuple[list[Completion], float]:
    """Answers to all of these at once, and the seconds that they took."""
    requests = [
        engine.requests(
            [[{"role": "user", "content": question}]],
            grammar=schema,
            temperature=temperature,
            seed=index,
            max_new_tokens=tokens,
        )[0]
        for index, question, schema in asked
    ]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    done = engine.complete(requests)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return done, time.perf_counter() - began


def is_valid(schema: Schema, text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "structured.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--shape", help="widen the default model to this shape, such as vicuna-7b")
    parser.add_argument("--beam", help="how much to draft, as WxL:N (default: the drafter's)")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--rows", type=int, default=8, help="answers written at once")
    parser.add_argument("--without-forced", type=int, default=20, help="schemas to answer without forced tokens too")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    beam = Shape.of(args.beam) if args.beam else None
    if args.shape:
        target, drafter, _ = load_wide(args.shape, "cuda" if torch.cuda.is_available() else "cpu")
        engine = Engine(target, drafter, shape=beam, runtime=args.runtime)
    else:
        engine = load(args.model, args.drafter, shape=beam, runtime=args.runtime)
    plain, watch = engine.plain(), Watch()
    asked = [(i, *make_schema(i)) for i in range(args.schemas)]
    answers(engine, asked[:1], 0.0, 4)  # what the first use prepares
    answers(plain, asked[:1], 0.0, 4)
    rows: list[dict[str, Any]] = []
    totals = {"speculative": 0.0, "plain": 0.0}
    for first in range(0, len(asked), args.rows):
        some = asked[first : first + args.rows]
        for temperature in (0.0, 1.0):
            with watch.watching():
                fast, seconds = answers(engine, some, temperature, args.tokens)
            totals["speculative"] += seconds
            slow, seconds = answers(plain, some, temperature, args.tokens)
            totals["plain"] += seconds
            unforced: list[Completion | None] = [None] * len(some)
            if first < args.without_forced:
                with no_forced_tokens():
                    unforced = list(answers(engine, some, temperature, args.tokens)[0])
            for (index, _, schema), ours, theirs, other in zip(some, fast, slow, unforced, strict=True):
                finished = ours.finish_reason == "stop"
                row = {
                    "schema": index,
                    "temperature": temperature,
                    "tokens": len(ours.tokens),
                    "steps": ours.stats.steps,
                    "finished": finished,
                    "valid": finished and is_valid(schema, ours.text),
                    "equal": ours.tokens == theirs.tokens,
                }
                if other is not None:
                    row |= {"unforced_steps": other.stats.steps, "unforced_equal": other.tokens == theirs.tokens}
                rows.append(row)
        headline = summary(rows, totals, watch.seconds)
        write_results(args.save, headline, rows)
        print(headline, flush=True)


def summary(rows: Sequence[dict[str, Any]], totals: dict[str, float], overhead: float) -> dict[str, float]:
    both = [row for row in rows if "unforced_steps" in row]

    def per_step(some: Sequence[dict[str, Any]], steps: str) -> float:
        """The first token belongs to the prompt's pass."""
        tokens: int = sum(row["tokens"] - 1 for row in some)
        taken: int = sum(row[steps] for row in some)
        return round(tokens / max(1, taken), 3)

    return {
        "texts": len(rows),
        "finished": sum(row["finished"] for row in rows),
        "valid": sum(row["valid"] for row in rows),
        "equal": sum(row["equal"] for row in rows),
        "tokens_per_step": per_step(rows, "steps"),
        "tokens_per_step_forced": per_step(both, "steps"),
        "tokens_per_step_unforced": per_step(both, "unforced_steps"),
        "speedup": round(totals["plain"] / totals["speculative"], 3),
        "overhead_ms": round(1000 * overhead / max(1, sum(row["steps"] for row in rows)), 3),
    }


if __name__ == "__main__":
    main()
