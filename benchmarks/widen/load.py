"""Load SmolLM2-135M and its drafter widened to the size of a larger model."""

from pathlib import Path

from benchmarks.widen.drafter import widen_recurrent
from benchmarks.widen.target import LlamaShape, widen
from redrafter.drafters import RecurrentDrafter, checkpoint, shipped
from redrafter.errors import DrafterMismatch
from redrafter.targets import Target, load_target
from redrafter.targets.load import parse_dtype

SMOKE = "smoke"
SMOKE_SHAPE = LlamaShape(hidden=64, layers=3, heads=4, kv_heads=4, mlp=64)
"""The shape of smoke runs, and its name."""
COSTS = {"vicuna-7b": "7B", "vicuna-13b": "13B", "vicuna-33b": "33B", "llama-3-8b": "8B", SMOKE: "smoke test"}


def label(shape: str) -> str:
    """Return the name under which every figure of a widened target is published.

    >>> label("vicuna-7b")
    'SmolLM2-135M behaviour at 7B cost'
    """
    return f"SmolLM2-135M behaviour at {COSTS[shape]} cost"


def shape_named(name: str) -> str | LlamaShape:
    """Return what `widen` takes for the shape's name on the command line."""
    return SMOKE_SHAPE if name == SMOKE else name


def load_wide(
    shape: str,
    device: str = "cuda",
    dtype: str | None = None,
    drafter_budget: str | int = "120M",
    model: str | None = None,
    drafter: Path | None = None,
) -> tuple[Target, RecurrentDrafter, str]:
    """Return a widened target with its tokenizer, the widened drafter, and the label for their figures.

    `model` and `drafter` are folders of the small pair (default: the default model and its own drafter).
    """
    small = load_target(model, dtype="fp32", device="cpu")
    folder = drafter or shipped.find(small)
    if folder is None:
        raise DrafterMismatch(f"no drafter comes with the package for {small.name}: give the folder of one")
    own = RecurrentDrafter(checkpoint.read_for(folder, small), small)  # type: ignore[arg-type]
    wide = widen(small.model, shape_named(shape), dtype=parse_dtype(dtype, device), device=device)
    target = load_target(wide, tokenizer=small.tokenizer)
    return target, widen_recurrent(own, target, drafter_budget), label(shape)
