"""Acceptance rules over temperatures (arXiv v1, Table 2): tokens/step, and what each does to the text.

    python benchmarks/rules.py

Quality is what can be computed offline: the mean log-probability per token that the target itself gives the text, at
temperature 1. A lossless rule must give what plain sampling gives, within the spread over texts; `seeded` must give the
very texts. `typical` is lossy: it prefers probable tokens, so its texts may be more probable than the target's own.
"""

import math
import statistics
from typing import Any

import torch

from common import arguments, first_turns
from redrafter.config import RuleConfig, Shape
from redrafter.engine import Engine
from redrafter.engine.request import Completion
from redrafter.engine.resolve import resolve_drafter
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target

TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 0.9)


@torch.no_grad()
def log_likelihood(target: Target, prompt: list[int], tokens: list[int]) -> float:
    """Mean log-probability of the tokens after the prompt."""
    whole = torch.tensor([[*prompt, *tokens]], device=target.device)
    logits = target.model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])
    return float(own.mean())


def contenders(target: Target, drafter: Any, beam: str) -> dict[str, Engine]:
    """All verify about as many nodes; rejection draws a fixed tree, three children at first and a chain below each."""
    shape = Shape.of(beam)
    branching = (3, *[1] * (shape.length - 1)) if shape.budget >= 2 * shape.length else (1,) * shape.length
    rules = {
        "seeded": RuleConfig(),
        "rejection": RuleConfig(name="rejection", branching=branching),
        "typical": RuleConfig(name="typical"),
    }
    made = {name: Engine(target, drafter, shape=shape, rule=rule) for name, rule in rules.items()}
    return {"plain": made["seeded"].plain()} | made


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "rules.json")
    parser.add_argument("--model", help="the target (default: the embedded one)")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--beam", default="4x4:7", metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    target = load_target(args.model, device=args.device)
    engines = contenders(target, resolve_drafter(args.drafter, target), args.beam)
    prompts = [engines["plain"].encode(m) for m in first_turns(args.questions, args.prompts)]
    rows: list[dict[str, Any]] = []
    headline: dict[str, float] = {}
    for temperature in args.temperatures:
        texts: dict[str, list[Completion]] = {}
        own: list[float] = []  # plain decoding's, the first
        for name, engine in engines.items():
            seeds = list(range(len(prompts)))
            options = {"max_new_tokens": args.tokens, "temperature": temperature, "seed": seeds}
            done = texts[name] = engine.generate(prompts, batch_size=args.batch, **options)
            worth = [log_likelihood(target, p, c.tokens) for p, c in zip(prompts, done, strict=True)]
            own = own or worth
            apart = [a - b for a, b in zip(worth, own, strict=True)]
            row = {
                "rule": name,
                "temperature": temperature,
                "beam": args.beam,
                "lossless": engine.rule_config.lossless,
                "texts": len(done),
                "tokens_per_step": sum(len(c.tokens) - 1 for c in done) / max(1, sum(c.stats.steps for c in done)),
                "log_likelihood": statistics.fmean(worth),
                "more_than_plain": statistics.fmean(apart),
                "standard_error": statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0,
                "equal_to_plain": sum(a.tokens == b.tokens for a, b in zip(done, texts["plain"], strict=True)),
            }
            rows.append(row)
            print(row, flush=True)
            if name != "plain":
                headline[f"{name}_tokens_per_step_t{temperature:g}"] = round(row["tokens_per_step"], 4)
        write_results(args.save, headline, rows)


if __name__ == "__main__":
    main()
