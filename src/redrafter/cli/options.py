"""Arguments that several verbs share. Help texts are the docstrings of the fields they fill."""

import argparse
import ast
import inspect
import textwrap
from typing import Any

from redrafter.config import Gamma, RuleConfig, SamplingParams, Shape
from redrafter.engine import Engine, load
from redrafter.errors import ConfigError


def field_help(cls: type) -> dict[str, str]:
    """The string literal that follows each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = str(text.value.value)
    return found


def add_target(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="a Hugging Face id or a folder (default: the embedded SmolLM2-135M-Instruct)")
    group.add_argument("--dtype", default="auto", help="fp32, bf16, fp16 or fp64 (default: bf16 on a GPU, else fp32)")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    return group


def add_model(parser: argparse.ArgumentParser) -> None:
    group = add_target(parser)
    group.add_argument(
        "--drafter",
        default="auto",
        help="'auto' (default: the one that comes with the package for this model, else 'ngram'), 'ngram' (needs no "
        "training), 'none', or a folder or Hub id of a recurrent drafter or of a smaller causal LM",
    )
    help_ = field_help(Shape)
    group.add_argument("--width", type=int, metavar="W", help=help_["width"])
    group.add_argument("--length", type=int, metavar="L", help=help_["length"])
    group.add_argument("--nodes", type=int, metavar="N", help=help_["nodes"])
    group.add_argument(
        "--runtime",
        default="auto",
        help="compiled (the fastest on a GPU, after about a minute at first use), graphs (ready in seconds) or eager "
        "(default: compiled on a GPU, eager on a CPU)",
    )
    group.add_argument(
        "--gamma",
        metavar="HOW",
        help="how far a drafter that is a causal LM guesses: constant (the beam's length), heuristic[:FIRST] (two more "
        "after a step that accepted all, else one less) or confidence[:P] (not past a guess less probable than P)",
    )
    help_ = field_help(RuleConfig)
    group.add_argument("--rule", default="seeded", help=f"seeded, rejection or typical. {help_['name']}")
    group.add_argument("--branching", default="", metavar="K,K,...", help=help_["branching"])
    group.add_argument("--epsilon", type=float, default=RuleConfig.epsilon, help=help_["epsilon"])
    group.add_argument("--delta", type=float, default=RuleConfig.delta, help=help_["delta"])


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    group = parser.add_argument_group("text")
    group.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="M", help=f"at most (default {max_new_tokens})"
    )
    group.add_argument("--seed", type=int, help="same seed, same text (default: a new one each time)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="write on past the model's own end")
    for name, text in field_help(SamplingParams).items():
        default = getattr(SamplingParams, name, None)
        if isinstance(default, int | float):
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, type=type(default), default=default, help=f"{text} (default {default})")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `Engine.generate` and `Engine.stream` take. Asked for before a model is loaded: it may be refused."""
    names = [n for n in field_help(SamplingParams) if hasattr(args, n)]
    options = {name: getattr(args, name) for name in names}
    SamplingParams(**options)
    return options | {
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
    }


def load_engine(args: argparse.Namespace, tuned: bool = True) -> Engine:
    """With a shape of the arguments, else what `redrafter tune` chose unless `tuned` is off, else the drafter's own."""
    try:
        branching = tuple(int(k) for k in args.branching.split(",") if k)
    except ValueError:
        raise ConfigError(f"--branching takes whole numbers with commas between, got {args.branching!r}") from None
    rule = RuleConfig(name=args.rule, branching=branching, epsilon=args.epsilon, delta=args.delta)
    given = {k: getattr(args, k) for k in ("width", "length", "nodes") if getattr(args, k) is not None}
    asked = Shape(**given)  # before a model is loaded for nothing
    gamma = Gamma.of(args.gamma) if args.gamma else None
    tuned = tuned and not given
    how = {"rule": rule, "gamma": gamma, "runtime": args.runtime, "dtype": args.dtype, "device": args.device}
    engine = load(args.model, args.drafter, shape=None if tuned else asked, **how)
    if tuned:
        return engine
    default = engine.drafter.default_shape
    chosen = Shape(**({"width": default.width, "length": default.length} | given)) if given else default
    return Engine(engine.target, engine.drafter, shape=chosen, rule=rule, runtime=args.runtime)


def as_prompt(engine: Engine, text: str, raw: bool) -> Any:
    """A user's turn through the chat template where the model has one, unless `raw`."""
    if raw or engine.target.tokenizer is None or engine.target.tokenizer.chat_template is None:
        return text
    return [{"role": "user", "content": text}]
