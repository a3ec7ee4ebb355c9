"""What `redrafter serve --remember-answers` saves: prompts that are asked again, and prompts that are not.

    python benchmarks/past_answers.py

Two servers, one with remembered answers and one without, are asked the same: first the prompts of a part, then its
second prompts, which are measured, each by both servers in turn. Both servers run in this process, without HTTP, one
request at a time. The server's own steps are those of `redrafter serve` on a CPU. They depend on measured times, and
tokens/step vary from run to run. With a given shape every step drafts, and tokens/step are the same in each run.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/past_answers.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import HERE, arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.engine import Engine, load
from redrafter.engine.request import Request
from redrafter.planning.steps import FixedSteps
from redrafter.results import check_new, write_results
from redrafter.serve.batches import make_batch
from redrafter.serve.config import ServeConfig
from redrafter.serve.job import Event, Job
from redrafter.serve.scheduler import Scheduler
from redrafter.serve.server import build, build_planned

ROOM = 1_000_000
"""Bytes of memory for the answers that the server remembers."""
DOCUMENT = 1500
"""Characters of a document."""
ASKED = ("Summarize the text above.", "List the three most important facts of the text above.")
CONTEXT = 1024


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", f"{tiny.drafter}+ngram", "--questions", tiny.questions]
    return [*words, "--documents", tiny.questions, "--prompts", 1, "--tokens", 6, "--rounds", 1, "--shape", "2x2:3"]


@dataclass(frozen=True)
class Part:
    """Prompts that are asked first, and those that are measured then."""

    name: str
    temperature: float
    first: list[Request]
    second: list[Request]


class Measured:
    """A server, and what its answers took."""

    def __init__(self, engine: Engine, shape: Shape | None, remembers: bool) -> None:
        config = ServeConfig(rows=2, context=CONTEXT, remember_answers=ROOM if remembers else 0)
        if shape is None:
            self.scheduler: Scheduler = build_planned(engine, config).scheduler
        else:
            fixed = Engine(engine.target, engine.drafter, shape=shape, exact=None)
            batch = make_batch(fixed, config, [shape])
            self.scheduler = build(fixed, batch, FixedSteps(shape), config).scheduler
        self.texts: list[list[int]] = []
        self.tokens, self.steps, self.seconds = 0, 0, 0.0

    def ask(self, requests: Sequence[Request], measured: bool = True) -> None:
        for request in requests:
            text: list[int] = []

            def listener(event: Event, text: list[int] = text) -> None:
                if event.error is not None:
                    raise event.error
                text += event.part.tokens if event.part is not None else []

            job = Job(request, listener, tokenizer=self.scheduler.batch.target.tokenizer)
            began = time.process_time()
            self.scheduler.submit([job])
            while not self.scheduler.idle:
                self.scheduler.turn()
            if measured:
                self.seconds += time.process_time() - began
                self.texts.append(text)
                self.tokens += len(text) - 1  # the prompt's pass gives the first
                self.steps += job.writer.stats.steps


def parts(engine: Engine, args: Any) -> list[Part]:
    questions = first_turns(args.questions, 2 * args.prompts)
    some, others = questions[::2], questions[1::2]
    texts = [
        messages[0]["content"].removeprefix("Summarize: ") for messages in first_turns(args.documents, args.prompts)
    ]
    documents = [
        [[{"role": "user", "content": f"{text[:DOCUMENT]}\n\n{question}"}] for text in texts] for question in ASKED
    ]

    def made(messages: list[list[dict[str, str]]], temperature: float, seed: int) -> list[Request]:
        seeds = [seed + i for i in range(len(messages))]
        return engine.requests(messages, max_new_tokens=args.tokens, temperature=temperature, seed=seeds)

    return [
        Part("the same prompt", 0.0, made(some, 0.0, 0), made(some, 0.0, 100)),
        Part("the same prompt and seed", 1.0, made(some, 1.0, 0), made(some, 1.0, 0)),
        Part("the same prompt, another seed", 1.0, made(some, 1.0, 0), made(some, 1.0, 100)),
        Part("the same document, another question", 0.0, made(documents[0], 0.0, 0), made(documents[1], 0.0, 0)),
        Part("another prompt", 0.0, made(some, 0.0, 0), made(others, 0.0, 0)),
    ]


def measure(engine: Engine, part: Part, shape: Shape | None, rounds: int) -> dict[str, Any]:
    """New servers in each round: what a round asks is remembered."""
    sums = {remembers: [0, 0, 0.0] for remembers in (False, True)}
    equal = recalled = 0
    for turn in range(rounds):
        servers = {remembers: Measured(engine, shape, remembers) for remembers in (False, True)}
        for server in servers.values():
            server.ask(part.first, measured=False)
        for i, request in enumerate(part.second):
            for remembers in (False, True) if (i + turn) % 2 else (True, False):
                servers[remembers].ask([request])
        for remembers, server in servers.items():
            found = (server.tokens, server.steps, server.seconds)
            sums[remembers] = [a + b for a, b in zip(sums[remembers], found, strict=True)]
            recalled += server.scheduler.metrics.recalled
        equal += sum(a == b for a, b in zip(servers[False].texts, servers[True].texts, strict=True))
    (tokens, without, slow), (_, steps, fast) = sums[False], sums[True]
    return {
        "part": part.name,
        "temperature": part.temperature,
        "steps": "the server's own" if shape is None else shape.label,
        "answers": rounds * len(part.second),
        "recalled": recalled,
        "equal": equal,
        "tokens_per_step": tokens / max(1, steps),
        "tokens_per_step_without": tokens / max(1, without),
        "ms_per_token": 1000 * fast / tokens,
        "ms_per_token_without": 1000 * slow / tokens,
        "speedup": slow / fast,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "past_answers.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--documents", type=Path, default=HERE / "data" / "cnn_dm.jsonl", help="questions with a text")
    parser.add_argument("--prompts", type=int, default=10, help="prompts of a part (default 10)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default 64)")
    parser.add_argument("--rounds", type=int, default=2, help="of the server's own steps (default 2)")
    parser.add_argument("--shape", default="4x4:7", help="of steps that always draft (default 4x4:7)")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    engine = load(args.model, args.drafter)
    rows = []
    for part in parts(engine, args):
        for shape, rounds in ((Shape.of(args.shape), 1), (None, args.rounds)):
            rows.append(measure(engine, part, shape, rounds))
            print(rows[-1], flush=True)
    repeated, own = rows[0], rows[1]
    headline: dict[str, float] = {
        "answers": sum(row["answers"] for row in rows),
        "equal": sum(row["equal"] for row in rows),
        "repeated_tokens_per_step": repeated["tokens_per_step"],
        "repeated_tokens_per_step_without": repeated["tokens_per_step_without"],
        "repeated_speedup": own["speedup"],
        "unrelated_speedup": rows[-1]["speedup"],
    }
    write_results(args.save, headline, rows)
    print(headline)


if __name__ == "__main__":
    main()
