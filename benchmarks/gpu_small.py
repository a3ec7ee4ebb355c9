"""The embedded SmolLM2-135M on a GPU, where launching kernels is most of the work: ours and transformers' own decoding.

    python benchmarks/gpu_small.py

Contenders take turns, prompt by prompt: our plain and speculative decoding (compiled, recorded), transformers'
`generate` (eager; with its compiled static cache; with prompt lookup). Whole answers are timed, prompts included; a
figure is the median over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import redrafter
from common import arguments, first_turns
from redrafter.config import Shape
from redrafter.engine.ties import first_difference
from redrafter.results import check_new, write_results

Answer = Callable[[list[int]], list[int]]
"""Prompt -> new tokens."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "gpu_small.json")
    parser.add_argument("--model", help="the target, converted already (default: the embedded one)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--beam", default="16x8:63", metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    args = parser.parse_args()
    if any(name.startswith("ours") for name in args.without):
        parser.error("--without: ours cannot be left out, all others are held against it")
    check_new(args.save, args.overwrite)
    engine = redrafter.load(args.model, shape=Shape.of(args.beam), dtype=args.dtype, device=args.device)
    prompts = [engine.encode(messages) for messages in first_turns(args.questions, args.prompts)]
    made = contenders(engine, args.tokens)
    every = {name: answer for name, answer in made.items() if name not in args.without}
    for name, answer in every.items():
        began = time.perf_counter()
        for prompt in prompts:  # all: prompts of other lengths are compiled and recorded for themselves
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
        save(args, rates, texts)  # after each round, so that a run that is cut short keeps what it found


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
        if row["contender"].startswith("transformers"):
            key = "vs_" + row["contender"].replace(", ", "_").replace(" ", "_")
            headline[key] = ours["tokens_per_second"] / row["tokens_per_second"]
    write_results(args.save, headline, rows)


def contenders(engine: redrafter.Engine, tokens: int) -> dict[str, Answer]:
    model, device = engine.target.model, engine.target.device
    eos = engine.eos_tokens()

    def ours(one: redrafter.Engine) -> Answer:
        return lambda prompt: list(one.generate(prompt, max_new_tokens=tokens).tokens)

    def theirs(**options: Any) -> Answer:
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
        "transformers, eager": theirs(),
        "transformers, static cache": theirs(cache_implementation="static"),
        "transformers, prompt lookup": theirs(prompt_lookup_num_tokens=10),
    }


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
