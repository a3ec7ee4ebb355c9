"""The memory that a running batch needs, known before any of it is allocated."""

from collections.abc import Sequence

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.memory import require_room
from redrafter.runtime.prefixes import FOR_EACH_PLACE
from redrafter.targets import Target


def check_room(
    target: Target, drafter: Drafter, shapes: Sequence[Shape], *, rows: int, kept: int, context: int, slack: int
) -> None:
    """Raise OutOfMemory if the rows' keys and values, or the logits of a step, cannot fit.

    slack: slots behind a row's tokens for the largest tree. Only what every use needs is counted, so nothing that fits
    is refused.
    """
    slots = (rows + kept) * (context + slack)
    pairs = [kind for pair in target.kv_layout().values() for kind in pair]
    cache = sum(heads * size * dtype.itemsize for heads, size, dtype, _ in pairs)
    state = target.state_of_row().nbytes
    copies = FOR_EACH_PLACE * (rows + kept)
    hidden = len(drafter.layers) * target.hidden_size * target.dtype.itemsize
    beam = max((shape.width for shape in shapes), default=0)
    logits = target.vocab_size * target.dtype.itemsize * max(slack, beam)
    require_room(
        f"{rows + kept} rows of {context} tokens",
        {
            "keys and values": slots * cache,
            "hidden states": slots * hidden,
            "the logits of a step": rows * logits,
            "recurrent states": (rows + kept + copies) * state,
            "the states of trees' nodes": rows * slack * state,
        },
        target.device,
        "use fewer rows, a shorter context or a smaller beam",
    )
