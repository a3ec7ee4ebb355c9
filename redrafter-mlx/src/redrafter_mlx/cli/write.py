"""`generate`, `chat`, `compare` and `serve`: the commands that write texts."""

import argparse
import sys
from typing import Any

import redrafter_mlx
from redrafter_mlx.config import SAMPLING, SamplingParams, require
from redrafter_mlx.server import Server

PROMPTS = (
    "Why is the sky blue?",
    "Write a short letter to a friend about a walk in the rain.",
    "List five uses of a paper clip, each with one sentence.",
    "Explain how a bicycle stays upright.",
)
"""What `compare`, `tune` and `bench` write about if no prompt is given."""


def open_engine(args: argparse.Namespace) -> Any:
    """Load what --model, --drafter and --shape name."""
    engine, _ = redrafter_mlx.load(args.model, drafter=args.drafter, shape=args.shape)
    return engine


def text_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Engine.generate`; raises for a wrong value, before a model is loaded."""
    sampling = {name: getattr(args, name) for name in SAMPLING}
    SamplingParams(**sampling)
    return sampling | {"max_new_tokens": args.max_new_tokens, "seed": args.seed, "stop": args.stop}


def as_prompt(engine: Any, text: str, raw: bool = False) -> Any:
    """A chat message where the model has a chat template, else plain text."""
    return text if raw or not engine.target.tokenizer.has_chat_template else [{"role": "user", "content": text}]


def write(engine: Any, prompt: Any, **options: Any) -> tuple[str, Any]:
    """Print a text as it comes -> the text and its statistics."""
    text, stats = "", None
    for response in engine.stream(prompt, **options):
        print(response.text, end="", flush=True)
        text, stats = text + response.text, response.stats
    print()
    return text, stats


def generate(args: argparse.Namespace) -> None:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    require(bool(text), "the prompt is empty")
    options = text_options(args)
    engine = open_engine(args)
    _, stats = write(engine, as_prompt(engine, text, args.raw), **options)
    if args.stats:
        print(
            f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, {stats.tokens_per_step:.2f} tokens/step "
            f"({engine.drafter.name}, {engine.shape.label})",
            file=sys.stderr,
        )


def chat(args: argparse.Namespace) -> None:
    options = text_options(args)
    engine = open_engine(args)
    kept = redrafter_mlx.PromptCache()  # earlier turns are read once
    messages = [{"role": "system", "content": args.system}] if args.system else []
    print("An empty line ends the conversation.")
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            said = ""
        if not said:
            return
        messages.append({"role": "user", "content": said})
        answer, _ = write(engine, messages, prompt_cache=kept, **options)
        messages.append({"role": "assistant", "content": answer})


def compare(args: argparse.Namespace) -> None:
    options = text_options(args) | {"seed": args.seed or 0}
    engine = open_engine(args)
    both = (engine.plain(), engine)
    for each in both:  # what is compiled at first use is not measured
        each.generate(as_prompt(engine, "Hello", args.raw), **options | {"max_new_tokens": 4})
    seconds, equal, prompts = [0.0, 0.0], 0, args.prompt or PROMPTS
    for text in prompts:
        done = [each.generate(as_prompt(engine, text, args.raw), **options) for each in both]
        equal += done[0].tokens == done[1].tokens
        seconds = [s + c.stats.seconds - c.stats.prompt_seconds for s, c in zip(seconds, done, strict=True)]
        plain, fast = (f"{c.stats.tokens_per_second:.1f} tokens/s" for c in done)
        what = "same text" if done[0].tokens == done[1].tokens else "another text"
        print(f"{what}, {plain} plain, {fast} and {done[1].stats.tokens_per_step:.2f} tokens/step fast: {text[:40]}")
    print(f"{equal} of {len(prompts)} texts are the same; {seconds[0] / max(seconds[1], 1e-9):.2f}x plain decoding")
    if equal < len(prompts):
        print("Texts part where the scores of two tokens are closer than rounding: see docs/mlx.md, Exactness.")


def serve(args: argparse.Namespace) -> None:
    require(0 <= args.port < 65536, f"a port is between 0 and 65535, got {args.port}")
    with Server(args.host, args.port) as server:
        server.engine = open_engine(args)
        port = server.server_address[1]
        print(f"redrafter-mlx serves {server.engine.target.name} on http://{args.host}:{port}/v1", flush=True)
        server.serve_forever()
