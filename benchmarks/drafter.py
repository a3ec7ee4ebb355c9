"""tokens/step of a drafter, alone and with n-grams, on MT-Bench and on four other question sets.

    python benchmarks/drafter.py --answers FOLDER --resume          # repeat the command until it says "done"
    python benchmarks/drafter.py --answers FOLDER --at-once         # all parts at the same time, on a GPU
    python benchmarks/drafter.py --suites alpaca_eval --resume      # adds one suite to the results
    python benchmarks/drafter.py --drafter FOLDER --suites mt_bench --shapes 16x6:63 4x4:7

The target writes its answers once, in the given dtype, at temperature 0 and 1. tokens/step are then simulated along the
answers for each shape, which gives the same figure as decoding (see tuning/simulate.py). An answer loops if its end
repeats with a period of at most 64 tokens, at least three times and for at least 32 tokens. Results are written after
each part: one set of questions at one temperature with one drafter. With --resume, parts in the results file are kept;
if another command, commit or machine measured these, a new part says under `run` what measured it. Rows about training
and ablations are always kept, unless --ablations or --training gives new ones.

Names in the headline: SUITE_tT_nN, the best of the shapes with N nodes, with n-grams; `_alone` without n-grams;
`_no_loops` without answers that loop.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/drafter.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.answers import write_answers
from benchmarks.at_once import run_at_once
from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters import WithNgrams
from redrafter.engine.resolve import resolve_drafter
from redrafter.interop.find import WITH_NGRAMS
from redrafter.questions import read_questions
from redrafter.results import check_new, here, write_results
from redrafter.targets import load_target
from redrafter.texts import Texts
from redrafter.tuning.simulate import SimulatedSteps, TextBatch, text_batches

KIND = "tokens/step"
SUITES = ("mt_bench", "cnn_dm", "gsm8k", "humaneval", "alpaca_eval")
SHAPES = {0.0: ("16x6:63", "16x8:63", "24x8:63", "4x4:7", "4x5:7"), 1.0: ("16x6:63", "16x8:63", "4x4:7", "4x5:7")}
FEW_SHAPES = {0.0: ("16x8:63", "4x5:7"), 1.0: ("16x6:63", "4x4:7")}
"""For all suites but MT-Bench."""


def loops(tokens: list[int]) -> bool:
    """Return whether the end of a text repeats.

    >>> loops(list(range(100))), loops(list(range(60)) + [7, 8, 9] * 11)
    (False, True)
    """
    for period in range(1, 65):
        length = max(3 * period, 32)
        end = tokens[-length:]
        if len(end) == length and all(a == b for a, b in zip(end, end[period:], strict=False)):
            return True
    return False


def measured(
    drafter: Drafter, batches: Sequence[TextBatch], texts: Texts, categories: Sequence[str], shape: Shape
) -> Iterator[dict[str, Any]]:
    """One row for all answers, one for those that do not loop, one for each category if there are several."""
    found = {row: steps for b in batches for row, steps in zip(b.rows, b.simulate(drafter, shape), strict=True)}
    looping = [loops(texts.row(i)[int(texts.prompts[i]) :].tolist()) for i in range(len(texts))]
    names = list(dict.fromkeys(categories))
    for name in ["all", "no loops", *(names if len(names) > 1 else [])]:
        chosen = [
            found[row]
            for row, (category, loop) in enumerate(zip(categories, looping, strict=True))
            if name in ("all", category) or (name == "no loops" and not loop)
        ]
        total = SimulatedSteps.total(chosen, shape)
        before = (total.steps, *total.reached)
        yield {
            "shape": shape.label,
            "answers": name,
            "count": len(chosen),
            "tokens": total.tokens,
            "steps": total.steps,
            "tokens_per_step": round(total.tokens_per_step, 4),
            "accepted_by_depth": [round(a / b, 4) if b else None for a, b in zip(total.reached, before, strict=False)],
        }


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The best tokens/step for each suite, temperature, node budget and drafter."""
    best: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "training":
            best["minutes_to_train"] = round(row["minutes_of_data"] + row["minutes_of_training_command"], 2)
        if row["kind"] != KIND or row["answers"] not in ("all", "no loops"):
            continue
        key = f"{row['suite']}_t{row['temperature']:g}_n{row['shape'].partition(':')[2]}"
        key += "" if row["drafter"].endswith(WITH_NGRAMS) else "_alone"
        key += "" if row["answers"] == "all" else "_no_loops"
        best[key] = max(best.get(key, 0.0), row["tokens_per_step"])
    return best


def earlier_rows(path: Path, resume: bool) -> list[dict[str, Any]]:
    """Return the rows of the results file that stay: parts to resume, and rows that this script does not measure."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in rows if row["kind"] != KIND or (resume and "suite" in row)]


def facts_of(path: Path, resume: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a results file says about the run that made it, and what new rows say about this run.

    New rows say nothing if all rows of the file come from this command, commit and machine.
    """
    own = here()
    if not (resume and path.exists()):
        return own, {}
    file = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("headline", "rows")}
    if all(file[name] == own[name] for name in ("command", "commit", "hardware")):
        return file | own, {}
    return file, {"run": {name: own[name] for name in ("command", "commit", "hardware", "date")}}


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--suites", tiny.questions]
    return [*words, "--max-new-tokens", 4, "--shapes", "4x4:7"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="recurrent", help="drafter folder (default: the one in the package)")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--suites", nargs="+", default=SUITES, help="names in benchmarks/data, or question files")
    parser.add_argument("--limit", type=int, default=80, metavar="K", help="questions of each suite (default 80)")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--shapes", nargs="+", help="measure only these shapes (default: all)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="keep the answers here for the next run")
    parser.add_argument("--ablations", type=Path, nargs="*", default=[], help="results of ablations.py to include")
    parser.add_argument(
        "--training",
        type=json.loads,
        metavar="JSON",
        help='how it was trained: {"hardware": ..., "minutes_of_data": ..., "minutes_of_training_command": ...}',
    )
    parser.add_argument("--save", type=Path, default=HERE / "results" / "drafter_smollm2.json", help="the results")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    parser.add_argument("--resume", action="store_true", help="measure only what the results file lacks")
    parser.add_argument(
        "--at-once", action=argparse.BooleanOptionalAction, default=False, help="a process per suite and temperature"
    )
    args = parse(parser, argv, smoke)
    if args.at_once and (args.resume or not args.answers):
        parser.error("--at-once needs --answers, and cannot resume")
    check_new(args.save, args.overwrite or args.resume)
    if args.at_once:
        parts = {
            f"{Path(s).stem}-{t:g}": ["--suites", s, "--temperatures", t]
            for s in args.suites
            for t in args.temperatures
        }
        words = sys.argv[1:] if argv is None else argv
        measured_rows, failed = run_at_once(__file__, words, parts, args.answers / "logs")
        rows = earlier_rows(args.save, resume=False) + [r for r in measured_rows if r["kind"] == KIND]
        write_results(args.save, headline(rows), rows)
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
        return
    target = load_target(args.model, dtype=args.dtype)
    alone = resolve_drafter(args.drafter, target)
    kind = str(getattr(alone, "name", "drafter"))
    drafters: dict[str, Drafter] = {kind + WITH_NGRAMS: WithNgrams(alone), kind: alone}
    rows, (made, run) = earlier_rows(args.save, args.resume), facts_of(args.save, args.resume)
    for kind, new in (
        ("ablation", [row for path in args.ablations for row in json.loads(path.read_text())["rows"]]),
        ("training", [args.training] if args.training else []),
    ):
        if new:
            rows = [row for row in rows if row["kind"] != kind] + [{"kind": kind} | row for row in new]
    done = {(r["suite"], r["temperature"], r["drafter"]) for r in rows if r["kind"] == KIND}
    with tempfile.TemporaryDirectory() as scratch:
        for suite, temperature in [(s, t) for s in args.suites for t in args.temperatures]:
            file = Path(suite) if Path(suite).exists() else HERE / "data" / f"{suite}.jsonl"
            shapes = args.shapes or (SHAPES if file.stem == SUITES[0] else FEW_SHAPES)[temperature]
            missing = [n for n in drafters if (file.stem, temperature, n) not in done]
            if not missing:
                continue
            folder = (args.answers or Path(scratch)) / file.stem
            texts = write_answers(target, file, args.max_new_tokens, temperature, folder, args.limit)
            categories = [q.category for q in read_questions(file, args.limit)]
            batches = list(text_batches(target, alone.layers, texts))
            for name in missing:
                part = {"kind": KIND, "suite": file.stem, "temperature": temperature, "drafter": name}
                for shape in shapes:
                    began = time.perf_counter()
                    found = measured(drafters[name], batches, texts, categories, Shape.of(shape))
                    new = [part | row | run for row in found]
                    seconds = time.perf_counter() - began
                    print(*part.values(), shape, new[0]["tokens_per_step"], f"({seconds:.1f} s)", flush=True)
                    rows += new
                write_results(args.save, headline(rows), rows, made)
    write_results(args.save, headline(rows), rows, made)
    print("done")


if __name__ == "__main__":
    main()
