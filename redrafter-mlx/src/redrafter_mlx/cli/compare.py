"""`redrafter-mlx compare`: the same texts plainly and speculatively, with their speeds."""

import argparse

from redrafter_mlx.cli.options import PROMPTS, add_model, add_text, as_prompt, open_engine, text_options


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="a prompt; may be repeated (four of our own)")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    add_model(parser)
    add_text(parser, tokens=64)


def run(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    engine = open_engine(args)
    plain = engine.plain()
    options = text_options(args) | {"seed": 0 if args.seed is None else args.seed}
    for each in (plain, engine):  # what is compiled at first use is not measured
        each.generate(as_prompt(engine, "Hello", args.raw), **options | {"max_new_tokens": 4})
    table = Table("prompt", "same text", "plain, tokens/s", "speculative, tokens/s", "tokens/step")
    seconds, equal, prompts = [0.0, 0.0], 0, args.prompt or PROMPTS
    for text in prompts:
        prompt = as_prompt(engine, text, args.raw)
        done = [each.generate(prompt, **options) for each in (plain, engine)]
        equal += done[0].tokens == done[1].tokens
        speeds = [f"{c.stats.tokens_per_second:.1f}" for c in done]
        seconds = [s + c.stats.seconds - c.stats.prompt_seconds for s, c in zip(seconds, done, strict=True)]
        same = "yes" if done[0].tokens == done[1].tokens else "no"
        table.add_row(text[:40], same, *speeds, f"{done[1].stats.tokens_per_step:.2f}")
    Console().print(table)
    print(f"{equal} of {len(prompts)} texts are the same; {seconds[0] / max(seconds[1], 1e-9):.2f}x plain decoding")
    if equal < len(prompts):
        print("Texts part where the scores of two tokens are closer than rounding: see docs/mlx.md, Exactness.")
