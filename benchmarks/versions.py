"""Compare two checkouts of redrafter on the same work: both run at once and take turns, so that noise hits both alike.

    python benchmarks/versions.py --old OLDER --parts plain step serve bulk
    python benchmarks/versions.py --old OLDER --device cpu --parts generate --add benchmarks/results/refactor.json

OLDER is a checkout. On a GPU the model is a Llama of 7B shape with random weights (times do not depend on the weights),
and bulk writing runs on one of SmolLM2-135M's shape. On a CPU it is the default model with its drafter. A ratio is
the older version's time divided by the newer's: above 1 the newer is faster.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/versions.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.common import HERE, arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.results import check_new, here, write_results

LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
SMALL = LLAMA_7B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
TINY = {k: 2 if "layers" in k else 4 if "heads" in k else 64 for k in LLAMA_7B} | {"max_position_embeddings": 2048}
DRAFTERS = {
    4096: {"state_size": 2048, "exit_size": 2048, "blocks": 4, "draft_vocab_size": 16384, "head": "own"},
    576: {"state_size": 1024, "exit_size": 1024, "blocks": 4, "draft_vocab_size": 16384},
    64: {"state_size": 32, "exit_size": 32, "blocks": 1},
}
NAMES = {
    "plain": "gpu_7b_plain_ratio",
    "step": "gpu_7b_step_ratio",
    "serve": "serve_gpu_ratio_at_8",
    "bulk": "bulk_ratio",
    "generate": "cpu_ratio",
}


class Side:
    """One version in a process of its own."""

    def __init__(self, checkout: Path, settings: dict[str, Any]) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "versions_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=checkout,
        )
        where = self._ask(json.dumps(settings))["package"]
        assert Path(str(where)).is_relative_to(checkout.resolve()), f"{where} is not the package of {checkout}"

    def _ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def run(self, part: str) -> float:
        return float(self._ask(f"run {part}")["ms"])

    def close(self) -> None:
        self.process.communicate()  # closes its input, which ends the process


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "refactor.json")
    parser.add_argument("--old", type=Path, required="--smoke" not in (argv or sys.argv), help="the older checkout")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each version")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bulk-rows", type=int, default=256)
    parser.add_argument("--shape", default=None, help="beam WxL:N (default: 16x5:63 on a GPU, 3x3:5 on a CPU)")
    parser.add_argument("--add", type=Path, help="results to keep beside these, in the same file")
    args = parse(parser, argv, smoke)
    save = args.add or args.save
    if args.add is None:
        check_new(save, args.overwrite)
    rows: list[dict[str, Any]] = json.loads(save.read_text())["rows"] if args.add else []
    made = (
        {k: v for k, v in json.loads(save.read_text()).items() if k not in ("rows", "headline")} if args.add else None
    )
    new = HERE.parent
    for part in args.parts:
        rows.append(compare(part, args, args.old or new, new) | ({"run": here()} if args.add else {}))
        headline = {NAMES[row["part"]]: row["ratio"] for row in rows}
        write_results(save, headline, rows, made)
        print(f"{part}: {rows[-1]['ratio']:.3f}")


def smoke(_: TinyFiles) -> list[object]:
    return [
        "--device",
        "cpu",
        "--parts",
        "plain",
        "bulk",
        "--rounds",
        1,
        "--prompts",
        1,
        "--tokens",
        3,
        "--bulk-rows",
        2,
    ]


def compare(part: str, args: argparse.Namespace, old: Path, new: Path) -> dict[str, Any]:
    llama = TINY if args.smoke else None if args.device == "cpu" else SMALL if part == "bulk" else LLAMA_7B
    settings = {
        "device": args.device,
        "llama": llama,
        "drafter": None if llama is None else DRAFTERS[llama["hidden_size"]],
        "shape": args.shape or ("16x5:63" if args.device == "cuda" else "3x3:5"),
        "prompts": args.prompts,
        "prompt": 64,
        "tokens": args.tokens,
        "bulk_rows": args.bulk_rows,
        "bulk_tokens": 2 * args.tokens,
    }
    sides = {"old": Side(old, settings), "new": Side(new, settings)}
    try:
        for side in sides.values():  # compile and record, then once more without
            side.run(part)
            side.run(part)
        turns = [{name: side.run(part) for name, side in sides.items()} for _ in range(args.rounds)]
    finally:
        for side in sides.values():
            side.close()
    ratios = [turn["old"] / turn["new"] for turn in turns]
    return {
        "part": part,
        "device": args.device,
        "model": "default model" if llama is None else f"random Llama, {llama['hidden_size']} wide",
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "old_ms": statistics.median(turn["old"] for turn in turns),
        "new_ms": statistics.median(turn["new"] for turn in turns),
    }


if __name__ == "__main__":
    main()
