"""The drafter options of `redrafter train`. Importing this module does not import torch."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from redrafter.bounds import Bounds, CountOrZero, Layer, Size, check
from redrafter.config import require
from redrafter.drafters import registry

if TYPE_CHECKING:
    from redrafter.drafters.base import DrafterConfig
    from redrafter.targets import Target

Cell = Literal["rnn", "gated", "none"]
FirstState = Literal["embedding", "zero", "context"]
HeadKind = Literal["own", "tied"]
Markov = Literal["none", "vanilla", "gated", "rnn"]
Blocks = Annotated[int, Bounds(least=0, most=1024)]


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """The kind of drafter to train, and its sizes where they do not follow from the target."""

    drafter: str = "recurrent"
    """A name of `registry.names()`."""
    cell: Cell = "gated"
    """`rnn` (the papers'), `gated` or `none`."""
    first_state: FirstState = "context"
    """State after the last token: its `embedding` (the papers'), or one cell update from `zero` or the `context`."""
    state_size: Size | None = None
    """Width of the recurrent state (default: 1024, or the target's hidden size if that is larger)."""
    exit_size: Size | None = None
    """Width of the residual blocks (default: the state's; medusa: the hidden state's); of the MLP of other kinds."""
    blocks: Blocks | None = None
    """Residual blocks before the head (default: 4; medusa: 1 at each depth); eagle3, block: layers (default: 1, 3)."""
    heads: Size | None = None
    """medusa: how many networks, the same as --depth (default 6); others: attention heads (default: one per 64)."""
    head: HeadKind = "tied"
    """`tied` to the target's output embedding, or `own` weights."""
    draft_vocab: CountOrZero = 16384
    """Guess only among the k tokens most frequent in the data (0: all)."""
    layers: tuple[Layer, ...] = ()
    """Hidden states the context is made of, -1 the last (default: an early, the middle and the last one)."""
    memory_heads: Annotated[int, Bounds(least=0, most=1024)] = 4
    """Heads of a memory over the accepted text (0: none)."""
    memory_size: Size = 128
    """Width of the memory's keys and values."""
    guesses: Annotated[int, Bounds(least=1, most=255)] = 6
    """block: how many tokens it guesses at once, the same as --depth."""
    causal: bool = False
    """block: a guess sees only what stands before it in the block."""
    markov: Markov = "none"
    """block: a Markov head corrects each guess by the one before: `vanilla`, `gated` or `rnn`."""
    normed: bool = True
    """Normalise hidden states, embeddings and the input of each block to unit size."""

    def __post_init__(self) -> None:
        check(self)
        accepted = ("drafter", *registry.get(self.drafter).config.training_options)
        for field in fields(self):
            if field.name not in accepted and getattr(self, field.name) != field.default:
                known = [name for name in registry.names() if name not in registry.packages()]
                takers = [k for k in known if field.name in registry.get(k).config.training_options]
                option = f"--{field.name.replace('_', '-')}"
                require(False, f"{option} belongs to the {' or '.join(takers)} drafter, not to {self.drafter}")

    def config_for(self, target: "Target") -> "DrafterConfig":
        """The network's sizes for a target."""
        return registry.get(self.drafter).config.for_target(self, target)
