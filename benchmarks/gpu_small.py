"""The default model, SmolLM2-135M, on a GPU, where kernel launches dominate: redrafter and transformers' `generate`.

    python benchmarks/gpu_small.py

Contenders take turns, prompt by prompt: redrafter's plain and speculative decoding (compiled, as CUDA graphs), the
latter also with a useless drafter, which must not be slower than plain decoding; and transformers' `generate` (eager;
with its compiled static cache; with prompt lookup). Whole answers are timed, including the prompt; figures are medians
over the rounds.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/gpu_small.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import redrafter
from benchmarks.common import arguments, first_turns, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.drafters.base import NetDrafter
from redrafter.drafters.traits import network_of
from redrafter.engine.ties import first_difference
from redrafter.errors import ConfigError
from redrafter.results import check_new, write_results

USELESS = "ours, useless drafter"

Generate = Callable[[list[int]], list[int]]
"""Prompt -> new tokens."""


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--device", "cpu", "--questions", tiny.questions]
    words += ["--without", "transformers, static cache"]  # transformers compiles it
    return [*words, "--beam", "2x3:4", "--prompts", 1, "--tokens", 4, "--rounds", 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "gpu_small.json")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--beam", default="16x8:63", metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out, by name")
    parser.add_argument("--drafter", default="auto")
    args = parse(parser, argv, smoke)
    if any(name.startswith("ours") for name in args.without):
        parser.error("--without cannot leave out redrafter: the others are compared with it")
    check_new(args.save, args.overwrite)
    engine = redrafter.load(args.model, args.drafter, shape=Shape.of(args.beam), dtype=args.dtype, device=args.device)
    prompts = [engine.encode(messages) for messages in first_turns(args.questions, args.prompts)]
    made = contenders(engine, args.tokens)
    every = {name: answer for name, answer in made.items() if name not in args.without}
    for name, answer in every.items():
        began = time.perf_counter()
        for prompt in prompts:  # prompts of other lengths are compiled and recorded separately
            answer(prompt)
        print(f"{name}: {time.perf_counter() - began:.1f} s for the first answers", flush=True)
    rates: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(args.rounds):
        spent, written = dict.fromkeys(every, 0.0), dict.fromkeys(every, 0)
        texts: dict[str, list[list[int]]] = {name: [] for name in every}
        for prompt in prompts:
            for name, answer in every.items():
                wait(args.device)
                began = time.perf_counter()
                new = answer(prompt)
                wait(args.device)
                spent[name] += time.perf_counter() - began
                written[name] += len(new)
                texts[name].append(new)
        for name in every:
            rates[name].append(written[name] / spent[name])
        save(args, rates, texts)  # after each round, so that an interrupted run keeps its results


def save(args: argparse.Namespace, rates: dict[str, list[float]], texts: dict[str, list[list[int]]]) -> None:
    plain, base = rates["ours, plain"], texts["ours, plain"]
    rows: list[dict[str, Any]] = [
        {
            "contender": name,
            "rounds": len(rates[name]),
            "tokens_per_second": statistics.median(rates[name]),
            "against_ours_plain": statistics.median(a / b for a, b in zip(rates[name], plain, strict=True)),
            "texts_equal_to_ours_plain": sum(
                first_difference(a, b) is None for a, b in zip(written, base, strict=True)
            ),
            "texts": len(base),
        }
        for name, written in texts.items()
    ]
    for row in rows:
        print(row, flush=True)
    ours = next(r for r in rows if r["contender"] == "ours, speculative")
    headline = {"tokens_per_second": ours["tokens_per_second"], "vs_own_plain": ours["against_ours_plain"]}
    for row in rows:
        if row["contender"] == USELESS:
            headline["useless_drafter_vs_own_plain"] = row["against_ours_plain"]
        if row["contender"].startswith("transformers"):
            key = "vs_" + row["contender"].replace(", ", "_").replace(" ", "_")
            headline[key] = ours["tokens_per_second"] / row["tokens_per_second"]
    write_results(args.save, headline, rows)


def contenders(engine: redrafter.Engine, tokens: int) -> dict[str, Generate]:
    model, device = engine.target.model, engine.target.device
    eos = engine.eos_tokens()

    def ours(one: redrafter.Engine) -> Generate:
        return lambda prompt: list(one.generate(prompt, max_new_tokens=tokens).tokens)

    def theirs(**options: Any) -> Generate:
        def answer(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt], device=device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=list(eos),
                pad_token_id=eos[0],
                **options,
            )
            return list(out[0, len(prompt) :].tolist())

        return answer

    return {
        "ours, plain": ours(engine.plain()),
        "ours, speculative": ours(engine),
        USELESS: ours(with_useless_drafter(engine)),
        "transformers, eager": theirs(),
        "transformers, static cache": theirs(cache_implementation="static"),
        "transformers, prompt lookup": theirs(prompt_lookup_num_tokens=10),
    }


def with_useless_drafter(engine: redrafter.Engine) -> redrafter.Engine:
    """The same shape of draft by random weights, which are hardly ever right. Steps may decode plainly instead."""
    drafter = network_of(engine.drafter)
    if not isinstance(drafter, NetDrafter):
        named = type(engine.drafter if drafter is None else drafter).__name__
        raise ConfigError(f"a drafter with a network is needed, got {named}: use --drafter recurrent")
    torch.manual_seed(0)
    random = type(drafter)(type(drafter.net)(drafter.net.config), engine.target)
    return redrafter.Engine(engine.target, random, shape=engine.shape, adapts=True)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
