"""Compares what we make of published drafter formats with what their original implementations gave on a CPU.

    python benchmarks/formats.py

For each format there is a tiny checkpoint in its published layout (`tiny_drafters.py`). The originals' logits over
three guesses are in data/drafter_formats.json; `originals.py` made them. The drafter here is the one that decoding
runs: it reads the folder, begins a text, advances by a token, and drafts. A format without an original that runs on a
CPU is read and run, and not counted as checked.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/formats.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from benchmarks.tiny_drafters import MODULES, PROMPT, TEXT, TINY, TinyTarget, states, text
from redrafter.core.accept import Accepted
from redrafter.drafters.load import bind
from redrafter.interop import mtp, published
from redrafter.interop.conventions import Follow
from redrafter.results import check_new, write_results

GOLDEN = HERE / "data" / "drafter_formats.json"
TOLERANCE = 1e-3
"""Of the largest difference, relative to the largest logit."""


@torch.no_grad()
def drafted(folder: Path, steps: int = 3) -> Tensor:
    """(steps, V') our logits for the tokens behind the prompt; the first reading of the folder."""
    target = TinyTarget()
    found = published.read(folder, target) or mtp.read(folder, target)
    found.net.config = found.readings[0].config
    drafter = bind(found.net, target)
    hidden, tokens = states(len(drafter.layers)), text()
    one = torch.ones(1, dtype=torch.long)
    half = PROMPT // 2  # a part of the prompt is read at once, the rest token by token
    state = drafter.begin(tokens[:, :half], one * half, hidden[:, :half], TEXT)
    for at in range(half, PROMPT + 1):
        new = tokens[:, at : at + 1]
        state = drafter.advance(state, Accepted(0 * new, new, one, 0 * one, 0 * one), hidden[:, at - 1 : at])
    search = Follow(tokens[:, PROMPT + 1 : PROMPT + 1 + steps])
    drafter.draft(state, tokens[:, PROMPT], search)
    return torch.cat(search.logits)


def difference(ours: Tensor, golden: Tensor) -> float:
    return float((ours.double() - golden.double()).abs().max() / golden.double().abs().max())


def compared() -> list[dict[str, Any]]:
    """For each format: its original, and the largest relative difference from it; None without an original."""
    golden = json.loads(GOLDEN.read_text())
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for i, (name, make) in enumerate((TINY | MODULES).items()):
            ours = drafted(make().write(Path(scratch) / str(i)))
            known = golden.get(name)
            rows.append(
                {
                    "format": name,
                    "original": None if known is None else known["original"],
                    "difference": None if known is None else difference(ours, torch.tensor(known["logits"])),
                }
            )
    return rows


def smoke(_: TinyFiles) -> list[object]:
    return []  # it is as small as can be


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--save", type=Path, default=HERE / "results" / "formats.json", help="path of the results")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    rows = compared()
    checked = [row["difference"] for row in rows if row["difference"] is not None]
    headline = {
        "formats_checked": len(checked),
        "formats_equal": sum(difference <= TOLERANCE for difference in checked),
        "largest_difference": max(checked),
    }
    write_results(args.save, headline, rows)
    for row in rows:
        found = row["difference"]
        print(row["format"], "no original runs on a CPU" if found is None else f"{found:.1e}")
    for name, value in headline.items():
        print(name, value)


if __name__ == "__main__":
    main()
