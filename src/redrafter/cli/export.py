"""`redrafter export`: writes a drafter in another project's format."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.paths import OutputFolder
from redrafter.cli.progress import waiting
from redrafter.config import Shape
from redrafter.errors import ConfigError
from redrafter.interop.find import find

if TYPE_CHECKING:
    from redrafter.drafters.base import DrafterNet

EPILOG = """examples:
  redrafter export my-drafter --to speculators --model my-org/my-model --out exported
  redrafter export my-eagle3 --to eagle3 --model my-org/my-model --out exported
  redrafter export my-block-drafter --to dflash --model my-org/my-model --out exported
  redrafter export my-drafter --to apple --out for-apple

speculators: the format of vLLM's `speculators` library, for recurrent, eagle3 and block drafters.
eagle3: the layout of EAGLE and SpecForge, for eagle3 drafters.
dflash: the layout of DFlash, for block drafters; with a Markov head that of DSpark.
apple: the format of ml-recurrent-drafter, for the papers' drafter only (docs/training-options.md says how to train it).
All commands read these formats back: --drafter exported."""
FORMATS = ("speculators", "eagle3", "dflash", "apple")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "drafter", help="folder or Hugging Face id of a drafter of redrafter train, or a recurrent one in any format"
    )
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
    add_value(parser, "--out", OutputFolder, required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="allow replacing a drafter in that folder")
    group = parser.add_argument_group("all formats but apple")
    group.add_argument("--model", help="the drafter's target, an id or a folder (default: SmolLM2-135M-Instruct)")
    depth = get_type_hints(Shape, include_extras=True)["length"]
    add_value(group, "--depth", depth, default=3, metavar="L", help="tokens to guess ahead (default 3)")


def run(args: argparse.Namespace) -> None:
    folder = find(args.drafter)
    from redrafter.interop import export

    if (found := export.own(folder)) is not None:
        _published(args, folder, *found)
    else:
        _recurrent(args, folder)


def _published(args: argparse.Namespace, folder: Path, net: "DrafterNet", made_for: dict[str, str]) -> None:
    """A drafter of published form; its target is loaded, for it has some of the weights."""
    from redrafter.drafters import checkpoint
    from redrafter.interop import export
    from redrafter.targets import load_target
    from redrafter.targets.default import default_model

    _check_format(args, net.config.kind, export.FORMATS[net.config.kind])
    name = _model(args, made_for)
    with waiting(Console(stderr=True), "loading the model"):
        target = load_target(args.model or str(default_model()), dtype="fp32", device="cpu")
    checkpoint.compare(made_for, target, f"the drafter {folder}", checkpoint.OTHERWISE)
    target.name = name
    architectures = _architectures(args.model or str(default_model()))
    export.write(args.out, net, target, args.to, architectures, args.depth, overwrite=args.overwrite)
    _report(args, net)


def _recurrent(args: argparse.Namespace, folder: Path) -> None:
    from redrafter.drafters import RecurrentNet
    from redrafter.interop import apple, folders, speculators
    from redrafter.targets.default import default_model

    net, made_for = folders.read(folder) or (None, {})
    if not isinstance(net, RecurrentNet):
        raise ConfigError(f"{folder} is not a recurrent drafter, nor an eagle3 or block one of redrafter train")
    _check_format(args, "recurrent", ("speculators", "apple"))
    if args.to == "apple":
        apple.write(args.out, net, overwrite=args.overwrite)
    else:
        name = _model(args, made_for)
        with waiting(Console(stderr=True), "reading the model's configuration"):
            architectures = _architectures(args.model or str(default_model()))
        speculators.write(args.out, net, made_for, name, architectures, args.depth, overwrite=args.overwrite)
    _report(args, net)


def _check_format(args: argparse.Namespace, kind: str, formats: Sequence[str]) -> None:
    if args.to not in formats:
        raise ConfigError(f"a {kind} drafter is exported to {' or '.join(formats)}, not to {args.to}")


def _model(args: argparse.Namespace, made_for: dict[str, str]) -> str:
    """What the drafter's target is called."""
    from redrafter.targets.default import NAME

    if args.model is None and made_for.get("name") != NAME:
        name = made_for.get("name", "an unnamed target")
        raise ConfigError(f"the drafter was trained for {name}; give that model with --model")
    return args.model or NAME


def _report(args: argparse.Namespace, net: "DrafterNet") -> None:
    print(f"{args.out}: {sum(p.numel() for p in net.parameters()) / 1e6:.1f} M parameters for {args.to}")


def _architectures(model: str) -> list[str]:
    from transformers import AutoConfig

    from redrafter.errors import first_line

    try:
        return list(AutoConfig.from_pretrained(model, trust_remote_code=False).architectures or [])
    except Exception as error:
        raise ConfigError(f"cannot read the configuration of {model!r} ({first_line(error)})") from error
