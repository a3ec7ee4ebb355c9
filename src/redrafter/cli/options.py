"""Arguments that several commands share.

torch and transformers take seconds to import: in this package, only the functions that need them import them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from redrafter.bounds import Count, shown
from redrafter.cli.fields import add_fields, add_value, field_help
from redrafter.config import RULES, Gamma, Grammar, RuleConfig, SamplingParams, Shape, Threads, check_text_options
from redrafter.drafters import registry
from redrafter.errors import ConfigError
from redrafter.interop.find import BUILT_IN, WITH_NGRAMS, find, stands_alone

if TYPE_CHECKING:
    from redrafter.engine import Engine

RUNTIMES = ("auto", "compiled", "graphs", "eager")
EXACT = ("auto", "require")
RULE_HELP = "; ".join(f"{name}: {rule.about}" for name, rule in RULES.items()) + " (default seeded)"


def add_target(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="a Hugging Face id, a folder or a GGUF file (default: SmolLM2-135M-Instruct)")
    group.add_argument(
        "--dtype",
        default="auto",
        help="fp32, bf16, fp16 or fp64 (default: bf16 on a GPU; on a CPU fp32, or a GGUF file's own weights); on a "
        "CPU also q8 or q4, which round the weights to 8 or 4 bits, and stored, which keeps the weights of a bf16 or "
        "fp16 checkpoint in half the memory of fp32; on any device int4 or fp8, as redrafter quantize rounds",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add_value(group, "--threads", Threads, help="threads on a CPU (default: one per physical core)")
    return group


def add_exact(group: Any) -> None:
    group.add_argument(
        "--exact",
        default="auto",
        choices=EXACT,
        help="require: run only if the text is that of plain decoding without exception (exactness bitwise; "
        "redrafter doctor says where); auto (default): differences at ties are allowed",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    group = add_target(parser)
    group.add_argument(
        "--drafter",
        default="auto",
        help=f"{named_drafters()}; or a folder or Hugging Face id of a trained drafter or of a smaller causal LM; with "
        "'+ngram' at the end, the drafter also guesses what followed the same words earlier in the text",
    )
    group.add_argument(
        "--kv-dtype",
        default="fp32",
        choices=("fp32", "fp16", "int8"),
        help="of the KV cache of a model that runs on packed weights on a CPU; fp16 takes half the memory, int8 little "
        "more than a quarter, and the text may differ from that of fp32 (default)",
    )
    group.add_argument(
        "--activations",
        choices=("int16", "int8", "fp32"),
        help="what such a model multiplies with its quantised weights; int16 (default) changes a text only at a near "
        "tie, fp32 rounds nothing and is slower, int8 rounds as llama.cpp does and is a little faster",
    )
    add_shape(group)
    group.add_argument(
        "--runtime",
        default="auto",
        choices=RUNTIMES,
        help="compiled (fastest on a GPU; the first use compiles for about a minute), graphs (ready in seconds) or "
        "eager (default: compiled on a GPU, eager on a CPU)",
    )
    add_exact(group)
    group.add_argument(
        "--gamma",
        metavar="HOW",
        help="how many tokens a causal LM drafts: constant (the beam length), heuristic[:FIRST] (two more after a step "
        "that accepted all, else one less) or confidence[:P] (stops after a token less probable than P)",
    )
    help_ = field_help(RuleConfig)
    group.add_argument("--rule", default="seeded", help=RULE_HELP)
    group.add_argument("--branching", default="", metavar="K,K,...", help=help_["branching"])
    add_fields(group, RuleConfig, ("epsilon", "delta"))


def named_drafters() -> str:
    """The drafters that need no folder, for a help text."""
    auto = (
        "'auto' (default: 'recurrent+ngram' if a drafter comes with the package for this model, 'mtp+ngram' if its "
        "checkpoint has a module that loads, else 'ngram')"
    )
    entries = {name: registry.ENTRIES[name] for name in registry.named()}
    own = [f"'{k}' ({entry.about}{'; the one in the package' if entry.kind else ''})" for k, entry in entries.items()]
    return ", ".join([auto, *own, *of_packages()])


def of_packages() -> list[str]:
    """The drafters of other packages, for a help text."""
    return [f"'{name}' (package {package})".replace("%", "%%") for name, package in registry.packages().items()]


def add_shape(group: Any, names: Sequence[str] = ("width", "length", "nodes")) -> None:
    """Without defaults: a drafter has its own."""
    help_, hints = field_help(Shape), get_type_hints(Shape, include_extras=True)
    for name in names:
        add_value(group, f"--{name}", hints[name], metavar=name[0].upper(), help=help_[name])


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    group = parser.add_argument_group("text")
    text = f"maximum number of new tokens (default {max_new_tokens})"
    add_value(group, "--max-new-tokens", Count, default=max_new_tokens, metavar="M", help=text)
    add_value(group, "--seed", int, help="the same seed gives the same text (default: a new seed each time)")
    help_ = "end the text before this string; repeatable"
    add_value(group, "--stop", str, action="append", default=[], metavar="TEXT", help=help_)
    group.add_argument("--ignore-eos", action="store_true", help="continue after the model's end-of-text token")
    add_fields(group, SamplingParams, without=("logit_bias",))


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Engine.generate` and `Engine.stream`. Bad values are refused here, before a model is loaded."""
    names = [n for n in field_help(SamplingParams) if hasattr(args, n)]
    options = {name: getattr(args, name) for name in names}
    SamplingParams(**options)
    check_text_options(args.max_new_tokens, args.stop)
    return options | {
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos,
    }


def add_grammar(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("grammar", "what the text must look like; needs `pip install llguidance`")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE", help="JSON that this JSON schema describes, on one line")
    one.add_argument("--regex", metavar="PATTERN", help="a text that this regular expression matches as a whole")
    one.add_argument("--lark", metavar="FILE", help="a text of this Lark or GBNF grammar")


def read_grammar(args: argparse.Namespace) -> Grammar | None:
    """The grammar that the arguments name. A file that cannot be read is refused here, before a model is loaded."""
    if args.regex is not None:
        return Grammar.regex(args.regex)
    name = args.json_schema or args.lark
    if name is None:
        return None
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    return Grammar.json_schema(text) if args.json_schema else Grammar.lark(text)


def find_drafter(name: str) -> str:
    """A name, or the folder of a drafter. What is missing or broken is refused here, before a model is loaded."""
    alone = name.removesuffix(WITH_NGRAMS)
    if stands_alone(name):
        if alone not in BUILT_IN and isinstance(registry.load(alone), registry.DrafterKind):
            raise ConfigError(f"{alone} is a kind of drafter that is trained: give the folder of a trained one")
        return name
    return str(find(alone)) + name.removeprefix(alone)


def load_engine(args: argparse.Namespace, adapts: bool = True) -> "Engine":
    """Load the model and the drafter that `add_model` describes.

    The shape is that of the arguments, drafted in every step; else the drafter's own, from which steps may depart if
    the engine `adapts`.
    Bad arguments are refused before anything is loaded.
    """
    try:
        branching = tuple(int(k) for k in args.branching.split(",") if k)
    except ValueError:
        raise ConfigError(f"--branching takes integers separated by commas, got {shown(args.branching)}") from None
    rule = RuleConfig(name=args.rule, branching=branching, epsilon=args.epsilon, delta=args.delta)
    given = {k: getattr(args, k) for k in ("width", "length", "nodes") if getattr(args, k) is not None}
    asked = Shape(**given)
    gamma = Gamma.of(args.gamma) if args.gamma else None
    if gamma and stands_alone(args.drafter):
        raise ConfigError(f"--gamma is for a drafter that is a causal LM, not for {args.drafter!r}: use --length")
    drafter = find_drafter(args.drafter)
    from redrafter import Engine, load, without_collection

    how = {"rule": rule, "gamma": gamma, "runtime": args.runtime, "dtype": args.dtype, "device": args.device}
    how |= {"kv_dtype": args.kv_dtype, "activations": args.activations}
    with without_collection():
        if adapts and not given:
            return load(args.model, drafter, exact=args.exact, **how)
        engine = load(args.model, drafter, shape=asked, **how)
    default = engine.drafter.default_shape
    chosen = Shape(**({"width": default.width, "length": default.length} | given)) if given else default
    how = {"rule": rule, "runtime": args.runtime, "exact": args.exact}
    return Engine(engine.target, engine.drafter, shape=chosen, adapts=False, **how)


def as_prompt(engine: "Engine", text: str, raw: bool) -> Any:
    """The text as a user's turn if the model has a chat template, unless `raw`."""
    if raw or engine.target.tokenizer is None or engine.target.tokenizer.chat_template is None:
        return text
    return [{"role": "user", "content": text}]
