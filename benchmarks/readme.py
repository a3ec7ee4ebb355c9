"""Fills figures of the README and of the drafter's card from results: python benchmarks/readme.py [--check]."""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/readme.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import json
import re
from typing import Any

from benchmarks.blocks import BLOCKS

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
GUIDE = HERE.parent / "docs/guide.md"
VLLM = HERE.parent / "docs/vllm.md"
CARD = HERE.parent / "src/redrafter/drafters/shipped/SmolLM2-135M-Instruct/README.md"


def source(result: dict[str, Any]) -> str:
    """What stands under every block: where the figures come from."""
    hardware = result["hardware"]
    machine = hardware.get("gpu") or f"{hardware.get('cpu') or hardware['machine']}, {hardware['threads']} threads"
    return f"`{result['command']}`; {machine}; torch {result['versions']['torch']}; commit {result['commit']}"


PAGES = {
    README: [
        "cpu_demo",
        "equality",
        "bf16",
        "bf16_cpu",
        "drafter",
        "cpu",
        "gpu",
        "gpu_small",
        "table1_gpu",
        "table1_cpu",
        "serve_equality",
        "serve_cpu",
        "serve_gpu",
        "verify_kernel",
        "summaries",
        "speech_sampling",
        "summaries_cpu",
        "speech_sampling_cpu",
    ],
    CARD: ["drafter"],
    GUIDE: ["ablation", "peers", "family", "lengths", "rules"],
    VLLM: ["vllm"],
}


def filled(page: Path) -> str:
    """The page with every block between <!-- name --> and <!-- /name --> made anew."""
    text = page.read_text()
    for name in PAGES[page]:
        file, table = BLOCKS[name]
        if not (HERE / "results" / file).exists():
            text = _put(page, text, name, f"Not measured yet: no `benchmarks/results/{file}`.")
            continue
        result = json.loads((HERE / "results" / file).read_text())
        # Rows that another run made say so themselves.
        made_by = next((r for r in result["rows"] if r.get("kind") == name and "command" in r), result)
        text = _put(page, text, name, f"{table(result)}\n\n<sub>{source(made_by)}</sub>")
    return text


def _put(page: Path, text: str, name: str, content: str) -> str:
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    text, count = re.subn(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        sys.exit(f"{page} has {count} blocks named {name}, expected one")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    args = parser.parse_args()
    for page in PAGES:
        new = filled(page)
        if not args.check:
            page.write_text(new)
        elif new != page.read_text():
            sys.exit(f"{page.name} does not match its results: run python benchmarks/readme.py")


if __name__ == "__main__":
    main()
