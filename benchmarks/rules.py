"""Acceptance rules at several temperatures (arXiv v1, Table 2): tokens/step and the likelihood of the texts.

    python benchmarks/rules.py

Quality is measured as the mean log-probability per token that the target gives the text at temperature 1. A lossless
rule must match plain sampling within the spread over texts; `seeded` must write the same texts. `typical` is lossy: it
prefers probable tokens, so its texts may have a higher likelihood than those of plain sampling.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/rules.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import RuleConfig, Shape
from redrafter.engine import Engine
from redrafter.engine.request import Completion
from redrafter.engine.resolve import resolve_drafter
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target

TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 0.9)


@torch.no_grad()
def log_likelihood(target: Target, prompt: list[int], tokens: list[int]) -> float:
    """Return the mean log-probability of `tokens` after `prompt`."""
    whole = torch.tensor([[*prompt, *tokens]], device=target.device)
    logits = target.model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])
    return float(own.mean())


def contenders(target: Target, drafter: Any, beam: str) -> dict[str, Engine]:
    """Return an engine per rule, all with about as many nodes.

    `rejection` samples a fixed tree: three children of the root, and a chain below each.
    """
    shape = Shape.of(beam)
    branching = (3, *[1] * (shape.length - 1)) if shape.budget >= 2 * shape.length else (1,) * shape.length
    rules = {
        "seeded": RuleConfig(),
        "rejection": RuleConfig(name="rejection", branching=branching),
        "typical": RuleConfig(name="typical"),
    }
    made = {name: Engine(target, drafter, shape=shape, rule=rule) for name, rule in rules.items()}
    return {"plain": made["seeded"].plain()} | made


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--device", "cpu", "--questions", tiny.questions]
    return [*words, "--prompts", 1, "--tokens", 4, "--temperatures", 0.7]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "rules.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="recurrent")
    parser.add_argument("--device")
    parser.add_argument("--beam", default="4x4:7", metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    target = load_target(args.model, device=args.device)
    engines = contenders(target, resolve_drafter(args.drafter, target), args.beam)
    prompts = [engines["plain"].encode(m) for m in first_turns(args.questions, args.prompts)]
    rows: list[dict[str, Any]] = []
    headline: dict[str, float] = {}
    for temperature in args.temperatures:
        texts: dict[str, list[Completion]] = {}
        plain: list[float] = []  # of plain decoding, which runs first
        for name, engine in engines.items():
            seeds = list(range(len(prompts)))
            options: dict[str, Any] = {"max_new_tokens": args.tokens, "temperature": temperature, "seed": seeds}
            done = texts[name] = engine.generate(prompts, batch_size=args.batch, **options)
            likelihoods = [log_likelihood(target, p, c.tokens) for p, c in zip(prompts, done, strict=True)]
            plain = plain or likelihoods
            gains = [a - b for a, b in zip(likelihoods, plain, strict=True)]
            row: dict[str, Any] = {
                "rule": name,
                "temperature": temperature,
                "beam": args.beam,
                "lossless": engine.rule_config.lossless,
                "texts": len(done),
                "tokens_per_step": sum(len(c.tokens) - 1 for c in done) / max(1, sum(c.stats.steps for c in done)),
                "log_likelihood": statistics.fmean(likelihoods),
                "more_than_plain": statistics.fmean(gains),
                "standard_error": statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0,
                "equal_to_plain": sum(a.tokens == b.tokens for a, b in zip(done, texts["plain"], strict=True)),
            }
            rows.append(row)
            print(row, flush=True)
            if name != "plain":
                headline[f"{name}_tokens_per_step_t{temperature:g}"] = round(row["tokens_per_step"], 4)
        write_results(args.save, headline, rows)


if __name__ == "__main__":
    main()
