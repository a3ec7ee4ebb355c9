"""How often a token copied from earlier in the text is right: the table `ODDS` of drafters/with_ngrams.py.

    python benchmarks/ngram_odds.py --answers FOLDER

The target answers questions of several kinds, at temperature 0 and 1. A drafter with n-grams is simulated along the
answers. At each of its steps the copied chain is compared with the text that follows. For each match length and depth,
the script counts the copied tokens whose predecessors in the chain were all right, and how many of them were right too.
MT-Bench is left out, because tokens/step are reported there.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/ngram_odds.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.answers import write_answers
from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.core.rules import BeamSearch, Search
from redrafter.core.tree import Tree
from redrafter.drafters import WithNgrams
from redrafter.drafters.with_ngrams import DEEPEST, LONGEST, SHORTEST, WithNgramsState
from redrafter.engine.resolve import resolve_drafter
from redrafter.results import check_new, write_results
from redrafter.targets import load_target
from redrafter.tuning.simulate import TextBatch, text_batches

KINDS = ("alpaca_eval", "cnn_dm", "gsm8k", "humaneval")
DEPTHS = ("first", "second", "later")
NAMES = {0.0: "greedy", 1.0: "sampled"}


class CountingDrafter(WithNgrams):
    """Compares every chain with the text that follows."""

    batch: TextBatch

    def start(self) -> None:
        self.counts = torch.zeros(2, LONGEST - SHORTEST + 1, DEEPEST)  # (right or decided, match length, depth)

    def draft(self, state: WithNgramsState, last: Tensor, search: Search) -> Tree:
        assert isinstance(search, BeamSearch)
        ends = self.batch.texts.lengths.to(last.device)
        places = search.positions[:, None] + 1 + torch.arange(DEEPEST, device=last.device)  # (B, D)
        known = (places < ends[:, None]) & (state.match > 0)[:, None]
        right = ((self.batch.token_at(places) == state.chain) & known).long().cumprod(1)
        decided = known & torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1).bool()
        size = (state.match - SHORTEST).clamp(min=0).cpu()
        for counted, new in zip(self.counts, (right, decided), strict=True):
            counted.index_add_(0, size, new.float().cpu())
        return super().draft(state, last, search)


def share(right: list[float], decided: list[float]) -> float:
    """The share of right tokens, with one right and one wrong token added: a rare case is not certain.

    >>> share([3.0], [4.0]), share([0.0, 0.0], [0.0, 0.0])
    (0.667, 0.5)
    """
    return round((sum(right) + 1) / (sum(decided) + 2), 3)


def rows_of(counts: Tensor, temperature: float) -> list[dict[str, Any]]:
    """The odds by match length: of the first copied token, of the second, of all later ones."""
    rows = []
    for size, (right, decided) in enumerate(zip(*counts.tolist(), strict=True), start=SHORTEST):
        rows.append(
            {
                "temperature": temperature,
                "match": size,
                "odds": [share(right[:1], decided[:1]), share(right[1:2], decided[1:2]), share(right[2:], decided[2:])],
                "right": [int(n) for n in right],
                "decided": [int(n) for n in decided],
            }
        )
    return rows


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions, "--count", 2]
    return [*words, "--max-new-tokens", 8, "--shape", "4x2:5"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument(
        "--questions", type=Path, nargs="+", default=[HERE / "data" / f"{kind}.jsonl" for kind in KINDS]
    )
    parser.add_argument("--count", type=int, default=20, help="questions of each file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="recurrent", help="the drafter that n-grams are mixed into")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--shape", default="16x6:63", help="the shape whose steps are counted")
    parser.add_argument("--answers", type=Path, help="folder that keeps the answers for the next run")
    parser.add_argument("--save", type=Path, default=HERE / "results" / "ngram_odds.json", help="path of the results")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load_target(args.model, dtype=args.dtype)
    drafter = CountingDrafter(resolve_drafter(args.drafter, target))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for temperature in NAMES:
            drafter.start()
            for file in args.questions:
                folder = (args.answers or Path(scratch)) / file.stem
                texts = write_answers(target, file, args.max_new_tokens, temperature, folder, args.count)
                for batch in text_batches(target, drafter.layers, texts):
                    drafter.batch = batch
                    batch.simulate(drafter, Shape.of(args.shape))
                print(temperature, file.stem, len(texts), "answers", flush=True)
            rows += rows_of(drafter.counts, temperature)
            headline = {
                f"{NAMES[row['temperature']]}_match_{row['match']}_{depth}": odds
                for row in rows
                for depth, odds in zip(DEPTHS, row["odds"], strict=True)
            }
            write_results(args.save, headline, rows)
    for name, odds in headline.items():
        print(name, odds)


if __name__ == "__main__":
    main()
