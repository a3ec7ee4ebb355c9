"""Answers that follow JSON schemas: are they valid, are they those of plain decoding with the same grammar, how fast?

    python benchmarks/structured.py --parts texts
    python benchmarks/structured.py --shape vicuna-7b --batch-beam 4x5:15 --beam 16x5:63 --parts speed texts

Part `texts`: each generated schema is answered at T = 0 and T = 1, speculatively and plainly, `--rows` answers at once
with both temperatures side by side. Every answer that ends by itself is validated. `--without-forced` schemas are
answered once more without the grammar's forced tokens. Part `speed`: `--timed` schemas, one answer at a time, with and
without a drafter by turns. Results are written after every `--group` schemas. No group begins after `--seconds`.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/structured.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
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
from benchmarks.widen.load import label, load_wide
from redrafter.config import Shape
from redrafter.drafters import WithNgrams
from redrafter.engine import Engine, grammar, load
from redrafter.engine.request import Completion, Request
from redrafter.results import check_new, write_results

BEGAN = time.perf_counter()
PARTS = ("texts", "speed")
TEMPERATURES = (0.0, 1.0)


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--schemas", 2, "--tokens", 16]
    return [*words, "--rows", 2, "--without-forced", 1, "--timed", 1]


class Watch:
    """Counts the time that grammars take on the host."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given)
            finally:
                self.seconds += time.perf_counter() - began

        return measured

    @contextmanager
    def watching(self) -> Iterator[None]:
        guide = grammar.GrammarGuide
        with (
            mock.patch.object(guide, "guess", self.timed(guide.guess)),
            mock.patch.object(guide, "mask", self.timed(guide.mask)),
        ):
            yield


class StructuredBenchmark:
    """The contenders, and the results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []
        shape, batch_shape = (Shape.of(x) if x else None for x in (args.beam, args.batch_beam or args.beam))
        if args.shape:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            folder = None if args.drafter == "auto" else Path(args.drafter)
            target, drafter, _ = load_wide(
                args.shape, device, drafter_budget=budget(args.budget), model=args.model, drafter=folder
            )
            self.alone = Engine(target, WithNgrams(drafter), shape=shape, runtime=args.runtime)
        else:
            self.alone = load(args.model, args.drafter, shape=shape, runtime=args.runtime)
        self.batched = self.alone
        if batch_shape != shape:
            self.batched = Engine(self.alone.target, self.alone.drafter, shape=batch_shape, runtime=args.runtime)
        self.plain = self.alone.plain()

    def requests(self, index: int) -> list[Request]:
        """One schema's question at each temperature."""
        question, schema = make_schema(index)
        asked = [{"role": "user", "content": question}]
        options: dict[str, Any] = {"grammar": schema, "seed": index, "max_new_tokens": self.args.tokens}
        return [self.plain.requests([asked], temperature=t, **options)[0] for t in TEMPERATURES]

    def texts(self) -> None:
        args = self.args
        for first in range(0, args.schemas, args.group):
            if time.perf_counter() - BEGAN > args.seconds:
                return
            indices = range(first, min(first + args.group, args.schemas))
            requests = [request for i in indices for request in self.requests(i)]
            fast = self.batched.complete(requests, rows=args.rows)
            slow = self.plain.complete(requests, rows=args.rows)
            unforced: list[Completion] = []
            if first < args.without_forced:
                some = requests[: len(TEMPERATURES) * (args.without_forced - first)]
                with mock.patch.object(grammar, "DEEPEST", 0):
                    unforced = self.batched.complete(some, rows=args.rows)
            asked = [(i, t) for i in indices for t in TEMPERATURES]
            for place, ((index, temperature), ours, theirs) in enumerate(zip(asked, fast, slow, strict=True)):
                finished = ours.finish_reason == "stop"
                row = {
                    "part": "texts",
                    "schema": index,
                    "temperature": temperature,
                    "tokens": len(ours.tokens),
                    "steps": ours.stats.steps,
                    "finished": finished,
                    "valid": finished and is_valid(make_schema(index)[1], ours.text),
                    "equal": ours.tokens == theirs.tokens,
                }
                if place < len(unforced):
                    other = unforced[place]
                    row |= {"unforced_steps": other.stats.steps, "unforced_equal": other.tokens == theirs.tokens}
                self.rows.append(row)
            self.save()

    def speed(self) -> None:
        """Time what comes after the first token, which both contenders choose from the prompt's pass."""
        watch = Watch()
        for engine in (self.alone, self.plain):  # what the first use prepares, at each temperature
            for request in self.requests(0):
                engine.complete([request])
        for index in range(self.args.timed):
            if time.perf_counter() - BEGAN > self.args.seconds:
                break
            for temperature, request in zip(TEMPERATURES, self.requests(index), strict=True):
                row: dict[str, Any] = {"part": "speed", "schema": index, "temperature": temperature}
                watch.seconds = 0.0
                with watch.watching():
                    (ours,) = self.alone.complete([request])
                (theirs,) = self.plain.complete([request])
                row |= {"tokens": len(ours.tokens), "steps": ours.stats.steps, "plain_steps": theirs.stats.steps}
                row |= {"seconds": seconds(ours), "plain_seconds": seconds(theirs), "grammar_seconds": watch.seconds}
                self.rows.append(row | {"equal": ours.tokens == theirs.tokens})
        self.save()

    def save(self) -> None:
        headline = summary(self.rows)
        about = {
            "part": "setup",
            "target": label(self.args.shape) if self.args.shape else self.plain.target.name,
            "rows": self.args.rows,
            "batch_beam": self.batched.shape.label,
            "beam": self.alone.shape.label,
            "recorded": self.alone.recorded,
            "exactness": self.alone.exactness,
        }
        write_results(self.args.save, headline, [about, *self.rows])
        print(headline, flush=True)


def budget(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def seconds(done: Completion) -> float:
    return done.stats.seconds - done.stats.first_token_seconds


def is_valid(schema: Schema, text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    texts = [row for row in rows if row["part"] == "texts"]
    both = [row for row in texts if "unforced_steps" in row]
    timed = [row for row in rows if row["part"] == "speed"]
    made: dict[str, float] = {}

    def total(some: Sequence[dict[str, Any]], key: str) -> float:
        return float(sum(row[key] for row in some))

    def per_step(some: Sequence[dict[str, Any]], steps: str) -> float:
        """The first token belongs to the prompt's pass."""
        return round((total(some, "tokens") - len(some)) / max(1, total(some, steps)), 3)

    if texts:
        made["texts"] = len(texts)
        made |= {key: int(total(texts, key)) for key in ("finished", "valid", "equal")}
        made["tokens_per_step"] = per_step(texts, "steps")
    if both:
        made["unforced_equal"] = int(total(both, "unforced_equal"))
        made["tokens_per_step_forced"] = per_step(both, "steps")
        made["tokens_per_step_unforced"] = per_step(both, "unforced_steps")
    if timed:
        made["timed_tokens_per_step"] = per_step(timed, "steps")
        made["step_ms"] = round(1e3 * total(timed, "seconds") / max(1, total(timed, "steps")), 3)
        made["plain_ms"] = round(1e3 * total(timed, "plain_seconds") / max(1, total(timed, "plain_steps")), 3)
        made["overhead_ms"] = round(1e3 * total(timed, "grammar_seconds") / max(1, total(timed, "steps")), 3)
        made["speedup"] = round(made["timed_tokens_per_step"] * made["plain_ms"] / max(1e-9, made["step_ms"]), 3)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "structured.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--shape", help="widen the default model to this shape, such as vicuna-7b")
    parser.add_argument("--beam", help="how much to draft, as WxL:N (default: the drafter's)")
    parser.add_argument("--batch-beam", help="the same in the part `texts` (default: --beam)")
    parser.add_argument("--budget", default="100M", help="parameters read per draft step of a widened drafter")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--group", type=int, default=25, help="schemas between two writings of the results")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--rows", type=int, default=8, help="answers written at once in the part `texts`")
    parser.add_argument("--without-forced", type=int, default=20, help="schemas to answer without forced tokens too")
    parser.add_argument("--timed", type=int, default=20, help="schemas in the part `speed`")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    bench = StructuredBenchmark(args)
    for part in args.parts:
        getattr(bench, part)()


if __name__ == "__main__":
    main()
