"""Sizes of a Medusa drafter."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from redrafter.bounds import Bounds, Size
from redrafter.config import require
from redrafter.drafters.base import DrafterConfig, require_matching_output, target_sizes
from redrafter.drafters.options import Blocks, DrafterOptions, HeadKind
from redrafter.targets import Target


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DrafterConfig):
    """Sizes of a Medusa drafter: one network for each depth. No network knows what another one guessed."""

    kind: ClassVar[str] = "medusa"
    training_options: ClassVar[tuple[str, ...]] = ("exit_size", "blocks", "heads", "draft_vocab", "layers")

    exit_size: Size
    """Width of the blocks."""
    heads: Annotated[int, Bounds(least=1, most=256)] = 6
    """How many tokens ahead it guesses: one network for each."""
    blocks: Blocks = 1
    """Residual blocks of each network."""
    bare: bool = False
    """Whether its networks are those of the paper's authors: residual blocks alone, over the hidden state as it is."""
    head: HeadKind = "tied"
    """`tied` to the target's output embedding, or for each `bare` network `own` weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head == "tied" or self.bare, "only bare Medusa networks have heads of their own")
        require(
            not self.bare or self.exit_size == self.context_size,
            f"bare Medusa networks are as wide as their context of {self.context_size}, got {self.exit_size}",
        )

    @classmethod
    def for_target(cls, options: DrafterOptions, target: Target) -> Self:
        require_matching_output(cls.kind, target)
        return cls(
            **target_sizes(options, target, options.layers or (-1,)),
            exit_size=options.exit_size or target.hidden_size,
            blocks=1 if options.blocks is None else options.blocks,
            heads=options.heads or 6,
        )

    def check_training(self, depth: int, rollouts: int) -> None:
        require(not self.bare, "published Medusa networks are not trained here")
        require(
            self.heads == depth,
            f"a Medusa drafter has one network for each depth: {self.heads} cannot learn a depth of {depth}; "
            "give --heads and --depth alike",
        )
