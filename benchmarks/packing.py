"""How much dynamic tree attention saves: tokens of real beams before and after packing.

The default target drafts for itself with beam search at every step of its own greedy answers. Each
final beam, W candidates of L tokens, is packed as in the papers and compared with the W·L tokens it
came as. Beside it: the same number of nodes, but the most probable of all the search visited.
"""

from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import arguments, first_turns
from redrafter import Engine, Shape, load
from redrafter.config import RuleConfig
from redrafter.core.accept import accept_seeded
from redrafter.core.beam import candidates, visited_nodes
from redrafter.core.rules import BeamRule, BeamSearch, make_rule
from redrafter.core.tree import Tree, pack, pack_beam
from redrafter.drafters import ModelDrafter
from redrafter.results import check_new, write_results


@dataclass(frozen=True)
class RecordingSearch(BeamSearch):
    """Packs final beams (the papers' way) or, given a budget, visited nodes; remembers the sizes."""

    budget: int | None = None
    sizes: list[int] = field(default_factory=list)

    def tree(self, advance, state, last, token_ids=None) -> Tree:
        beam = self.beam(advance, state, last, token_ids)
        if self.budget is None:
            tree, _ = pack_beam(candidates(beam), last)
        else:
            tree, _ = pack(visited_nodes(beam), last, self.budget)
        self.sizes.extend((tree.valid.sum(1) - 1).tolist())
        return tree


@dataclass(frozen=True)
class RecordingRule(BeamRule):
    budget: int | None = None
    sizes: list[int] = field(default_factory=list)

    def search(self, sampling, seeds, lengths) -> RecordingSearch:
        plain = super().search(sampling, seeds, lengths)
        return RecordingSearch(plain.shape, plain.sampling, plain.noise, self.budget, self.sizes)


def measure(
    target, shape: Shape, prompts: list, tokens: int, budget: int | None, label: str
) -> tuple[list[int], float]:
    """Sizes of all trees on the way, and tokens/step."""
    engine = Engine(target, ModelDrafter(target, target), shape=shape)
    plain = make_rule(RuleConfig(), shape, target.vocab_size, target.dtype)
    assert isinstance(plain, BeamRule)
    engine.rule = rule = RecordingRule(plain.config, shape, plain.vocab_size, plain.dtype, accept_seeded, budget)
    done = [c for p in track(prompts, label) for c in engine.generate([p], max_new_tokens=tokens)]
    return rule.sizes, sum(len(c.tokens) - 1 for c in done) / sum(c.stats.steps for c in done)


def main() -> None:
    parser = arguments(__doc__ or "", "packing.json")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--length", type=int, default=5)
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    target = load(drafter=None).target
    prompts = first_turns(args.questions, args.prompts)
    rows = []
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
    table = Table(title="beams of the default target, drafting for itself")
    columns = (
        "W×L",
        "tokens before",
        "after (p1, mean, p99)",
        "saved",
        "tokens/step",
        "same nodes, best of all visited",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            f"{r['width']}×{r['length']}",
            str(r["before"]),
            f"{r['after_p1']}, {r['after_mean']:.1f}, {r['after_p99']}",
            f"{r['saved']:.0%}",
            f"{r['tokens_per_step']:.2f}",
            f"{r['tokens_per_step_same_nodes_by_score']:.2f}",
        )
    Console().print(table)
    write_results(args.save, {f"saved_w{r['width']}": r["saved"] for r in rows}, rows)


if __name__ == "__main__":
    main()
