"""`redrafter quantize`: writes a model with its weights rounded to 4 bits or to fp8."""

import argparse
import contextlib
import functools
from collections.abc import Callable

from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.paths import OutputFolder
from redrafter.cli.progress import stages

EPILOG = """examples:
  redrafter quantize my-model --to int4 --out my-model-int4
  redrafter quantize my-org/my-model --to fp8 --out my-model-fp8
  redrafter generate "Why is the sky blue?" --model my-model-int4

int4: weights of 4 bits, a scale for each group of 128. Activations stay as they are.
fp8: weights and activations of 8 bits, a scale for each block of 128 x 128 weights and for each 128 activations.
Where 128 does not divide a model's sizes, 64 or 32 take its place. Embeddings, heads, norms and routers stay as they
are. The folder has the layout of compressed-tensors. To resume a run that was stopped, give the same command again.
To round at load without writing a folder: --dtype int4 or --dtype fp8."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="a Hugging Face id or a folder with safetensors files (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--to", required=True, choices=("int4", "fp8"), help="the scheme")
    add_value(parser, "--out", OutputFolder, required=True, metavar="FOLDER", help="folder to write; empty or new")


def run(args: argparse.Namespace) -> None:
    from redrafter.targets.default import default_model
    from redrafter.targets.quantised.write import quantise_folder
    from redrafter.train.lock import only_writer

    console = Console(stderr=True)
    model = str(default_model()) if args.model is None else args.model
    with only_writer(args.out), contextlib.ExitStack() as stack:

        @functools.cache
        def bar() -> Callable[[str, int, int], None]:
            """The progress bar, which begins with the first weights: a refusal shows none."""
            return stack.enter_context(stages(console))

        written = quantise_folder(model, args.out, args.to, lambda done, total: bar()("rounding", done, total))
    sizes = f"{written.bytes_before / 2**20:.0f} MiB before, {written.bytes_after / 2**20:.0f} MiB now"
    print(f"{args.out}: {written.layers} layers in {args.to}, groups of {written.size}; {sizes}")
