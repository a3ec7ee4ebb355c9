"""What `make demo` shows, beside transformers' `generate` on the same prompts.

    python benchmarks/cpu_demo.py

Plain and speculative decoding take turns step by step, as in `redrafter compare`; then transformers writes the same
text with fp32 weights. Times include the prompts; they are medians over the rounds. `first_token_seconds` is the time
of a new process from the end of its imports to its first token, the median of three, and `first_token_cpu_seconds` the
processor time of the same span, which other programs on the machine change less. The imports come before:
`import_seconds`, of which `transformers_import_seconds` are those of transformers' tokenizers. Results are saved after
each prompt.
"""

import os
import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/cpu_demo.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in the commands

import json
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from rich.progress import track

import redrafter
from benchmarks.common import arguments, parse
from benchmarks.cpu_writers import transformers_generate
from benchmarks.smoke import TinyFiles
from redrafter.cli.compare import DEMO_PROMPTS, Comparison, compare, headline, warm_up
from redrafter.cli.console import Console
from redrafter.results import check_new, write_results
from redrafter.targets.default import default_model

START = """
import json, sys, time
began = time.perf_counter()
from redrafter.engine.engine import load
own = time.perf_counter()
import transformers.tokenization_utils_tokenizers  # `load` would import it, to read the tokenizer
imported, busy = time.perf_counter(), time.process_time()
engine = load(sys.argv[1] or None, sys.argv[2], device="cpu")
next(iter(engine.stream("Why is the sky blue?", max_new_tokens=8, temperature=0)))
print(json.dumps({
    "import_seconds": imported - began,
    "transformers_import_seconds": imported - own,
    "first_token_seconds": time.perf_counter() - imported,
    "first_token_cpu_seconds": time.process_time() - busy,
}))
"""


def time_start(model: Path | None, drafter: str, rounds: int = 3) -> dict[str, float]:
    """Seconds of the imports, and from there to the first token."""
    command = [sys.executable, "-c", START, str(model or ""), drafter]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(rounds)]
    times: list[dict[str, float]] = [json.loads(done.stdout.splitlines()[-1]) for done in runs]
    return {name: round(statistics.median(each[name] for each in times), 2) for name in times[0]}


def figures_of(rows: list[dict[str, Any]], comparisons: list[Comparison]) -> dict[str, float]:
    total = sum(row["tokens"] for row in rows)
    figures = headline(comparisons) | {
        "tokens_per_second": total / sum(row["speculative_seconds"] for row in rows),
        "plain_tokens_per_second": total / sum(row["plain_seconds"] for row in rows),
        "transformers_tokens_per_second": sum(row["transformers_tokens"] for row in rows)
        / sum(row["transformers_seconds"] for row in rows),
    }
    figures["vs_transformers"] = figures["tokens_per_second"] / figures["transformers_tokens_per_second"]
    return {name: round(value, 3) for name, value in figures.items()}


def smoke(tiny: TinyFiles) -> list[object]:
    return ["--model", tiny.model, "--drafter", tiny.drafter, "--tokens", 4, "--rounds", 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "cpu_demo.json")
    parser.add_argument("--tokens", type=int, default=64, help="at most this many new tokens per text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    start = time_start(args.model, args.drafter, 3 if args.model is None else 1)
    engine = redrafter.load(args.model, args.drafter, device="cpu")
    write = transformers_generate(args.model or default_model())
    quiet = Console(quiet=True)
    rows: list[dict[str, Any]] = []
    last: list[Comparison] = []
    for prompt in track(DEMO_PROMPTS, "prompts"):
        [request] = engine.requests([[{"role": "user", "content": prompt}]], max_new_tokens=args.tokens)
        warm_up(engine, request)
        write(list(request.prompt), min(args.tokens, 8))
        found, theirs = [], []
        for _ in range(args.rounds):
            found.append(compare(engine, request, prompt, quiet))
            tokens, seconds, _ = write(list(request.prompt), args.tokens)
            theirs.append(seconds)
        for side in ("plain", "speculative"):
            getattr(found[-1], side).seconds = statistics.median(getattr(c, side).seconds for c in found)
        last.append(found[-1])
        same = tokens == found[-1].speculative.tokens
        row = found[-1].row() | {"equal": all(c.difference is None for c in found), "equal_to_transformers": same}
        rows.append(row | {"transformers_tokens": len(tokens), "transformers_seconds": statistics.median(theirs)})
        figures = figures_of(rows, last) | start
        write_results(args.save, figures, rows)
    print(figures)


if __name__ == "__main__":
    main()
