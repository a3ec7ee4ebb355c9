"""Sizes of an EAGLE drafter."""

from dataclasses import dataclass
from typing import ClassVar, Self

from redrafter.bounds import Positive, Size
from redrafter.config import require
from redrafter.drafters.base import DrafterConfig, require_matching_output, target_sizes
from redrafter.drafters.options import DrafterOptions
from redrafter.targets import Target


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DrafterConfig):
    """Sizes of an EAGLE drafter's transformer layer. Its context is always the last hidden state."""

    kind: ClassVar[str] = "eagle"
    training_options: ClassVar[tuple[str, ...]] = ("exit_size", "heads", "draft_vocab", "layers")

    heads: Size
    """Attention heads."""
    head_size: Size = 64
    """Width of each attention head."""
    exit_size: Size
    """Width of the layer's MLP."""
    rotary_base: Positive = 10_000.0
    """Base of the rotary position embedding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head_size % 2 == 0, f"head_size must be even, got {self.head_size}")
        require(self.layers == (-1,), f"an EAGLE drafter reads the last hidden state, layers -1, got {self.layers}")

    @classmethod
    def for_target(cls, options: DrafterOptions, target: Target) -> Self:
        require_matching_output(cls.kind, target)
        hidden = target.hidden_size
        head_size = min(64, hidden)
        return cls(
            **target_sizes(options, target, options.layers or (-1,)),
            exit_size=options.exit_size or getattr(target.config, "intermediate_size", None) or 4 * hidden,
            heads=options.heads or hidden // head_size,
            head_size=head_size,
        )

    def check_training(self, depth: int, rollouts: int) -> None:
        require(
            not rollouts,
            "an EAGLE drafter learns from whole texts, not from rollouts: give data made without --local",
        )
