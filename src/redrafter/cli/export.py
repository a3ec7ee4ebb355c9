"""`redrafter export`: a drafter's folder in another project's format."""

import argparse
from pathlib import Path

from redrafter.drafters import RecurrentNet
from redrafter.errors import ConfigError
from redrafter.interop import apple, folders, speculators
from redrafter.targets.default import NAME, default_model
from redrafter.targets.load import first_line

EPILOG = """examples:
  redrafter export my-drafter --to speculators --model my-org/my-model --out exported
  redrafter export my-drafter --to apple --out for-apple

speculators: a folder in the conventions of vLLM's `speculators` library, with weights as safetensors.
apple: ml-recurrent-drafter's; it has a place for the papers' drafter only (see "The drafter's options" in the guide).
Both are read back wherever a drafter is named: --drafter exported."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", help="folder or Hub id of a recurrent drafter, in any format that we read")
    parser.add_argument("--to", required=True, choices=("speculators", "apple"), help="whose format")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where it goes")
    parser.add_argument("--overwrite", action="store_true", help="replace a drafter that lies there")
    group = parser.add_argument_group("speculators")
    group.add_argument("--model", help="the drafter's target, an id or a folder (default: the embedded model)")
    group.add_argument("--depth", type=int, default=3, metavar="L", help="tokens to guess ahead (default 3)")


def run(args: argparse.Namespace) -> None:
    folder = folders.find(args.drafter)
    net, made_for = folders.read(folder) or (None, {})
    if not isinstance(net, RecurrentNet):
        raise ConfigError(f"{folder} is no recurrent drafter; only those can be exported")
    if args.to == "apple":
        apple.write(args.out, net, overwrite=args.overwrite)
    else:
        if args.model is None and made_for.get("name") != NAME:
            name = made_for.get("name", "an unnamed target")
            raise ConfigError(f"the drafter was made for {name}; say where that model is with --model")
        name, architectures = args.model or NAME, _architectures(args.model or str(default_model()))
        speculators.write(args.out, net, made_for, name, architectures, args.depth, overwrite=args.overwrite)
    print(f"{args.out}: {sum(p.numel() for p in net.parameters()) / 1e6:.1f} M parameters for {args.to}")


def _architectures(model: str) -> list[str]:
    from transformers import AutoConfig

    try:
        return list(AutoConfig.from_pretrained(model).architectures or [])
    except Exception as error:
        raise ConfigError(f"cannot read the configuration of {model!r} ({first_line(error)})") from error
