"""How much packing a beam into a tree saves: tokens of real beams before and after packing.

    python benchmarks/packing.py

The target drafts for itself with beam search at every step of its own greedy answers. Each final beam, W candidates of
L tokens, is packed as in the papers and compared with its W·L tokens. For comparison, a second run verifies the same
number of nodes, but takes the most probable of all nodes that the search visited.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/packing.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.common import arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from redrafter import Engine, Shape, load
from redrafter.core.beam import candidates, visited_nodes
from redrafter.core.rules import BeamSearch, Search
from redrafter.core.tree import Tree, pack, pack_beam
from redrafter.drafters.causal_lm import CausalLMState, ModelDrafter
from redrafter.results import check_new, write_results
from redrafter.targets import Target


@dataclass(frozen=True, kw_only=True)
class RecordingSearch(BeamSearch):
    """A beam search that packs final beams (as in the papers) or, given a budget, the best visited nodes."""

    budget: int | None
    sizes: list[int] = field(default_factory=list)
    """Receives the number of nodes of each packed tree, without the root."""

    def tree(self, advance: Any, state: Any, last: Tensor, token_ids: Tensor | None = None, _: Any = None) -> Tree:
        beam = self.beam(advance, state, last, token_ids)
        if self.budget is None:
            tree, _ = pack_beam(candidates(beam), last)
        else:
            tree, _ = pack(visited_nodes(beam), last, self.budget)
        self.sizes.extend((tree.valid.sum(1) - 1).tolist())
        return tree


class RecordingDrafter(ModelDrafter):
    """The target as its own draft model, which drafts with a `RecordingSearch`."""

    def __init__(self, target: Target, budget: int | None) -> None:
        super().__init__(target, target)
        self.budget = budget
        self.sizes: list[int] = []

    def draft(self, state: CausalLMState, last: Tensor, search: Search) -> Tree:
        assert isinstance(search, BeamSearch)
        given = {f.name: getattr(search, f.name) for f in fields(search)}
        return super().draft(state, last, RecordingSearch(**given, budget=self.budget, sizes=self.sizes))


def measure(
    target: Target, shape: Shape, prompts: list[Any], tokens: int, budget: int | None, label: str
) -> tuple[list[int], float]:
    """Return the sizes of all trees, and tokens/step."""
    drafter = RecordingDrafter(target, budget)
    engine = Engine(target, drafter, shape=shape)
    done = [c for p in track(prompts, label) for c in engine.generate([p], max_new_tokens=tokens)]
    return drafter.sizes, sum(len(c.tokens) - 1 for c in done) / sum(c.stats.steps for c in done)


def smoke(tiny: TinyFiles) -> list[object]:
    return ["--model", tiny.model, "--questions", tiny.questions, "--prompts", 1, "--tokens", 4, "--widths", 2]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "packing.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--length", type=int, default=5)
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load(args.model, drafter=None).target
    prompts = first_turns(args.questions, args.prompts)
    rows: list[dict[str, Any]] = []
    for width in args.widths:
        shape = Shape(width=width, length=args.length)
        sizes, per_step = measure(target, shape, prompts, args.tokens, None, f"W={width}, final beams")
        mean = sum(sizes) / len(sizes)
        _, budgeted = measure(target, shape, prompts, args.tokens, round(mean), f"W={width}, best {round(mean)} nodes")
        ordered = sorted(sizes)
        rows.append(
            {
                "width": width,
                "length": args.length,
                "before": width * args.length,
                "after_mean": mean,
                "after_p1": ordered[len(ordered) // 100],
                "after_p99": ordered[-1 - len(ordered) // 100],
                "saved": 1 - mean / (width * args.length),
                "tokens_per_step": per_step,
                "tokens_per_step_same_nodes_by_score": budgeted,
                "steps": len(sizes),
            }
        )
    Console().print(table(rows, target.name))
    write_results(args.save, {f"saved_w{r['width']}": r["saved"] for r in rows}, rows)


def table(rows: list[dict[str, Any]], name: str) -> Table:
    made = Table(title=f"beams of {name}, drafting for itself")
    columns = ("W×L", "tokens", "nodes (p1, mean, p99)", "saved", "tokens/step", "tokens/step, best visited nodes")
    for column in columns:
        made.add_column(column, justify="right")
    for r in rows:
        made.add_row(
            f"{r['width']}×{r['length']}",
            str(r["before"]),
            f"{r['after_p1']}, {r['after_mean']:.1f}, {r['after_p99']}",
            f"{r['saved']:.0%}",
            f"{r['tokens_per_step']:.2f}",
            f"{r['tokens_per_step_same_nodes_by_score']:.2f}",
        )
    return made


if __name__ == "__main__":
    main()
