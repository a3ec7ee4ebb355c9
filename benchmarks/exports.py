"""Compares the guesses of exported drafters with those before: read back by us, and by the classes of `speculators`.

    python benchmarks/exports.py --checkouts FOLDER

Tiny untrained drafters, as `redrafter train` makes them, are written as `redrafter export` writes them. FOLDER holds a
checkout of the public repository `speculators`; its code is imported from there, and none of it is kept here. It takes
an input embedding that is not in the file from the target, and so do we.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/exports.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import originals
from benchmarks.common import HERE, bare_arguments, parse
from benchmarks.formats import TOLERANCE, difference
from benchmarks.smoke import TinyFiles
from benchmarks.tiny_drafters import EXIT, HEADS, LAYERS, PROMPT, TEXT, VOCAB, Tiny, TinyTarget, states, text
from redrafter.core.accept import Accepted
from redrafter.drafters import checkpoint
from redrafter.drafters.base import DrafterNet, NetDrafter
from redrafter.drafters.load import bind
from redrafter.drafters.options import DrafterOptions
from redrafter.interop import export, published
from redrafter.interop.conventions import Follow
from redrafter.results import check_new, write_results

Original = Callable[[Tiny], Tensor]
BLOCK: dict[str, Any] = {"drafter": "block", "guesses": 4}
CASES: dict[str, tuple[dict[str, Any], str, Original | None]] = {
    "eagle3 to eagle3": ({"drafter": "eagle3"}, "eagle3", None),
    "eagle3 to speculators": ({"drafter": "eagle3"}, "speculators", originals.speculators_eagle3),
    "block to dflash": (BLOCK, "dflash", None),
    "causal block to dflash": (BLOCK | {"causal": True}, "dflash", None),
    "block to speculators": (BLOCK, "speculators", originals.speculators_dflash),
    "block, vanilla Markov head, to dflash": (BLOCK | {"markov": "vanilla"}, "dflash", None),
    "block, vanilla Markov head, to speculators": (
        BLOCK | {"markov": "vanilla"},
        "speculators",
        originals.speculators_dspark,
    ),
    "block, gated Markov head, to speculators": (
        BLOCK | {"markov": "gated", "head": "own"},
        "speculators",
        originals.speculators_dspark,
    ),
    "block, recurrent Markov head, to speculators": (
        BLOCK | {"markov": "rnn"},
        "speculators",
        originals.speculators_dspark,
    ),
}
"""What is written -> options of training, the format, and what runs the original."""


class FullTarget(TinyTarget):
    """What training and export have to know besides."""

    max_positions = 64
    config = SimpleNamespace(rms_norm_eps=1e-5, intermediate_size=EXIT, num_hidden_layers=LAYERS)


def untrained(options: dict[str, Any], target: Any) -> DrafterNet:
    """A network with random weights that guesses among half of the tokens, in no order."""
    torch.manual_seed(1)
    net = checkpoint.make(DrafterOptions(heads=HEADS, draft_vocab=VOCAB // 2, **options).config_for(target)).eval()
    for parameter in net.parameters():
        parameter.normal_(0, 0.2)
    assert net.token_ids is not None
    net.token_ids.copy_(torch.randperm(VOCAB)[: VOCAB // 2])
    return net


def guesses(drafter: NetDrafter[Any], steps: int = 3) -> Tensor:
    """(steps, V') logits for the tokens behind the prompt, in the order of the tokens."""
    hidden, tokens = states(len(drafter.layers)), text()
    one = torch.ones(1, dtype=torch.long)
    state = drafter.begin(tokens[:, :PROMPT], one * PROMPT, hidden[:, :PROMPT], TEXT)
    new = tokens[:, PROMPT : PROMPT + 1]
    accepted = Accepted(0 * new, new, one, 0 * one, 0 * one)
    state = drafter.advance(state, accepted, hidden[:, PROMPT - 1 : PROMPT])
    search = Follow(tokens[:, PROMPT + 1 : PROMPT + 1 + steps])
    drafter.draft(state, tokens[:, PROMPT], search)
    assert search.token_ids is not None
    return torch.cat(search.logits)[:, search.token_ids.argsort()]


@torch.no_grad()
def compared(checked: bool) -> list[dict[str, Any]]:
    """For each export the largest relative differences; that of the original is None where it was not run."""
    target: Any = FullTarget()
    rows = []
    for name, (options, to, original) in CASES.items():
        net = untrained(options, target)
        before = guesses(bind(net, target))
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            export.write(folder, net, target, to, ["LlamaForCausalLM"], depth=3)
            found = published.read(folder, target)
            assert found is not None, "it is recognised"
            found.net.config = found.readings[0].config
            again = guesses(bind(found.net, target))
            tiny = Tiny(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))
        row = {"export": name, "read_back": difference(again, before), "original": None}
        if checked and original is not None:
            tiny.tensors["embed_tokens.weight"] = target.input_embedding.weight
            row["original"] = difference(original(tiny), before)
        rows.append(row)
    return rows


def smoke(_: TinyFiles) -> list[object]:
    return []  # it is as small as can be


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--checkouts", type=Path, help="folder with a checkout of speculators (default: none is run)")
    parser.add_argument("--save", type=Path, default=HERE / "results" / "exports.json", help="path of the results")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    if args.checkouts is not None:
        sys.path.insert(0, str(args.checkouts / "speculators" / "src"))
        originals.stand_in()
    rows = compared(args.checkouts is not None)
    checked = [row["original"] for row in rows if row["original"] is not None]
    headline = {
        "exports_read_back": sum(row["read_back"] <= TOLERANCE for row in rows),
        "exports_checked": len(checked),
        "exports_equal": sum(found <= TOLERANCE for found in checked),
        "largest_difference": max([row["read_back"] for row in rows] + checked),
    }
    write_results(args.save, headline, rows)
    for name, value in headline.items():
        print(name, value)


if __name__ == "__main__":
    main()
