"""SmolLM2-135M and its drafter at the size of larger models: their behaviour at those models' cost."""

from redrafter.drafters import RecurrentDrafter, checkpoint, shipped
from redrafter.drafters.widen import widen_drafter
from redrafter.targets import Target, load_target, widen
from redrafter.targets.load import parse_dtype

COSTS = {"vicuna-7b": "7B", "vicuna-13b": "13B", "vicuna-33b": "33B", "llama-3-8b": "8B"}


def label(shape: str) -> str:
    """What every figure made with a widened target must be called.

    >>> label("vicuna-7b")
    'SmolLM2-135M behaviour at 7B cost'
    """
    return f"SmolLM2-135M behaviour at {COSTS[shape]} cost"


def load_wide(
    shape: str, device: str = "cuda", dtype: str | None = None, drafter_budget: str = "120M", model: str | None = None
) -> tuple[Target, RecurrentDrafter, str]:
    """A checked target with the tokenizer, its drafter, and the label for figures made with them."""
    small = load_target(model, dtype="fp32", device="cpu")
    folder = shipped.find(small)
    assert folder is not None
    drafter = RecurrentDrafter(checkpoint.read_for(folder, small), small)
    model = widen(small.model, shape, dtype=parse_dtype(dtype, device), device=device)
    target = load_target(model, tokenizer=small.tokenizer)
    return target, widen_drafter(drafter, target, drafter_budget), label(shape)
