"""Sizes of a recurrent drafter."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from redrafter.bounds import Bounds, Size
from redrafter.config import require
from redrafter.drafters.base import DrafterConfig, target_sizes
from redrafter.drafters.options import Blocks, Cell, DrafterOptions, FirstState, HeadKind
from redrafter.targets import Target


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(DrafterConfig):
    """Sizes and variants of a recurrent drafter."""

    kind: ClassVar[str] = "recurrent"
    training_options: ClassVar[tuple[str, ...]] = (
        "cell", "first_state", "state_size", "exit_size", "blocks", "head", "draft_vocab", "layers", "memory_heads",
        "memory_size", "normed",
    )  # fmt: skip

    state_size: Size
    """Width of the recurrent state s."""
    exit_size: Size
    """Width of the blocks; an input projection is used when it differs from state + context."""
    blocks: Blocks = 2
    """Residual blocks between [s, h] and the head."""
    cell: Cell = "rnn"
    """`rnn`: s = silu(U s + W e + b); `gated`: the same, mixed with the old s by a gate; `none`: s = e + s."""
    first_state: FirstState = "embedding"
    """State after the last token: its `embedding`, or one cell update from `zero` or the `context`."""
    head: HeadKind = "own"
    """`own` weights, or `tied` to the target's output embedding through a projection."""
    normed: bool = False
    """Normalise hidden states, embeddings and block inputs to unit size: layers differ by orders of magnitude."""
    memory_heads: Annotated[int, Bounds(least=0, most=1024)] = 0
    """Heads of a memory that persists over the accepted text (0: none)."""
    memory_size: Size = 64
    """Width of its keys and values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_state == "embedding" or self.cell == "none":
            require(
                self.state_size == self.embedding_size,
                f"first_state={self.first_state}, cell={self.cell} need state_size == embedding_size, "
                f"got {self.state_size} and {self.embedding_size}",
            )

    @property
    def joint_size(self) -> int:
        """Width of [s, h], plus the memory's output if there is a memory."""
        return self.state_size + self.context_size + self.memory_heads * self.memory_size

    @classmethod
    def for_target(cls, options: DrafterOptions, target: Target) -> Self:
        count = target.layer_count
        layers = options.layers or (*sorted({min(2, count - 1), count // 2}), -1)
        sizes = target_sizes(options, target, layers)
        embedding = sizes["embedding_size"]
        state = options.state_size or max(1024, target.hidden_size)
        if options.first_state == "embedding" or options.cell == "none":
            require(
                options.state_size in (None, embedding),
                f"first_state={options.first_state}, cell={options.cell} need the embedding's state_size, {embedding}",
            )
            state = embedding
        return cls(
            **sizes,
            state_size=state,
            exit_size=options.exit_size or state,
            blocks=4 if options.blocks is None else options.blocks,
            cell=options.cell,
            first_state=options.first_state,
            head=options.head,
            normed=options.normed,
            memory_heads=options.memory_heads,
            memory_size=options.memory_size,
        )
