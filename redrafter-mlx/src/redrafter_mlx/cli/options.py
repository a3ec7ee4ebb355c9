"""Options that several commands share, and the engine they describe."""

import argparse
from typing import Any

from redrafter_mlx.config import SamplingParams, Shape

PROMPTS = (
    "Why is the sky blue?",
    "Write a short letter to a friend about a walk in the rain.",
    "List five uses of a paper clip, each with one sentence.",
    "Explain how a bicycle stays upright.",
)
"""What `compare`, `tune` and `bench` write about if no prompt is given."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def add_model(parser: argparse.ArgumentParser, *, shape: bool = True, required: bool = True) -> None:
    parser.add_argument("--model", required=required, help="a folder or Hugging Face id that mlx-lm can load")
    parser.add_argument(
        "--drafter", default="auto", help="auto, recurrent, ngram, none, or a drafter folder (with +ngram behind it)"
    )
    if shape:
        parser.add_argument("--shape", help="WxL or WxL:N, such as 2x3:4: beam width, length and nodes to verify")


def add_text(parser: argparse.ArgumentParser, tokens: int = 256) -> None:
    parser.add_argument("--max-new-tokens", type=int, default=tokens, help=f"at most this many ({tokens})")
    parser.add_argument("--seed", type=int, help="same seed, same text")
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the text; may be repeated")
    for name in SAMPLING:
        default = SamplingParams.__dataclass_fields__[name].default
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"({default})")


def check(args: argparse.Namespace) -> None:
    """Raise for a wrong value before a model is loaded."""
    if getattr(args, "shape", None) is not None:
        Shape.of(args.shape)
    if hasattr(args, "temperature"):
        SamplingParams(**{name: getattr(args, name) for name in SAMPLING})


def text_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Engine.generate`."""
    named = {name: getattr(args, name) for name in SAMPLING}
    return named | {"max_new_tokens": args.max_new_tokens, "seed": args.seed, "stop": args.stop}


def open_engine(args: argparse.Namespace) -> Any:
    """Load what --model, --drafter and --shape name."""
    import redrafter_mlx

    check(args)
    engine, _ = redrafter_mlx.load(args.model, drafter=args.drafter, shape=getattr(args, "shape", None))
    return engine


def as_prompt(engine: Any, text: str, raw: bool) -> Any:
    """A chat message where the model has a chat template, else plain text."""
    return text if raw or not engine.target.tokenizer.has_chat_template else [{"role": "user", "content": text}]
