"""`redrafter export`: writes a drafter in another project's format."""

import argparse
from typing import get_type_hints

from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.paths import OutputFolder
from redrafter.cli.progress import waiting
from redrafter.config import Shape
from redrafter.errors import ConfigError
from redrafter.interop.find import find

EPILOG = """examples:
  redrafter export my-drafter --to speculators --model my-org/my-model --out exported
  redrafter export my-drafter --to apple --out for-apple

speculators: the format of vLLM's `speculators` library, with weights as safetensors.
apple: the format of ml-recurrent-drafter, for the papers' drafter only (docs/training-options.md says how to train it).
All commands read both formats back: --drafter exported."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "drafter", help="folder or Hugging Face id of a recurrent drafter, in any format that redrafter reads"
    )
    parser.add_argument("--to", required=True, choices=("speculators", "apple"), help="the format")
    add_value(parser, "--out", OutputFolder, required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="allow replacing a drafter in that folder")
    group = parser.add_argument_group("speculators")
    group.add_argument("--model", help="the drafter's target, an id or a folder (default: SmolLM2-135M-Instruct)")
    depth = get_type_hints(Shape, include_extras=True)["length"]
    add_value(group, "--depth", depth, default=3, metavar="L", help="tokens to guess ahead (default 3)")


def run(args: argparse.Namespace) -> None:
    folder = find(args.drafter)
    from redrafter.drafters import RecurrentNet
    from redrafter.interop import apple, folders, speculators
    from redrafter.targets.default import NAME, default_model

    net, made_for = folders.read(folder) or (None, {})
    if not isinstance(net, RecurrentNet):
        raise ConfigError(f"{folder} is not a recurrent drafter; only those can be exported")
    if args.to == "apple":
        apple.write(args.out, net, overwrite=args.overwrite)
    else:
        if args.model is None and made_for.get("name") != NAME:
            name = made_for.get("name", "an unnamed target")
            raise ConfigError(f"the drafter was trained for {name}; give that model with --model")
        with waiting(Console(stderr=True), "reading the model's configuration"):
            name, architectures = args.model or NAME, _architectures(args.model or str(default_model()))
        speculators.write(args.out, net, made_for, name, architectures, args.depth, overwrite=args.overwrite)
    print(f"{args.out}: {sum(p.numel() for p in net.parameters()) / 1e6:.1f} M parameters for {args.to}")


def _architectures(model: str) -> list[str]:
    from transformers import AutoConfig

    from redrafter.errors import first_line

    try:
        return list(AutoConfig.from_pretrained(model, trust_remote_code=False).architectures or [])
    except Exception as error:
        raise ConfigError(f"cannot read the configuration of {model!r} ({first_line(error)})") from error
