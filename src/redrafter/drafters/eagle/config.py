"""Sizes of an EAGLE-like drafter."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from redrafter.bounds import Size
from redrafter.config import require
from redrafter.drafters.base import require_matching_output, target_sizes
from redrafter.drafters.decoder import DecoderConfig, sizes_for
from redrafter.drafters.options import DrafterOptions, HeadKind
from redrafter.targets import Target


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """Sizes of an EAGLE-like network, and what published ones do differently.

    The defaults are what `redrafter train` makes: one layer that guesses the target's last hidden state.
    """

    kind: ClassVar[str] = "eagle"
    training_options: ClassVar[tuple[str, ...]] = ("exit_size", "heads", "draft_vocab", "layers")

    width: Size | None = None
    """Width of the features (that of the context when not given)."""
    projected: bool = False
    """Whether a product makes the first feature of the context. Otherwise the context is the feature."""
    context_norm: Literal["none", "whole", "each"] = "none"
    """Norm before that product: of the whole context, or of each hidden state in it."""
    joined: bool = False
    """Whether the first layer's attention reads feature and embedding side by side. Otherwise a product fuses them."""
    residual: Literal["plain", "normed"] = "plain"
    """Which feature the first layer's output is added to, where `joined`: as it is, or normalised."""
    recycled: Literal["plain", "normed"] = "plain"
    """Which output is the next guess's feature: before the last norm, or after it."""
    last_norm: bool = False
    """Whether the last layer's output is normalised for the head."""
    head: HeadKind = "tied"
    """`tied` to the target's output embedding, or `own` weights."""
    own_embedding: bool = False
    """Whether it has an input embedding of its own."""
    value_size: Size | None = None
    """Width of each head's values (that of its keys when not given)."""
    first_embedding: bool = True
    """Whether the text's first pair has the embedding of its token. Otherwise that is zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.projected or (self.features == self.context_size and len(self.layers) == 1),
            f"an EAGLE drafter without a product for its context reads one hidden state of its own width, got layers "
            f"{self.layers}, a context of {self.context_size} and features of {self.features}",
        )
        if self.context_norm == "each":
            require(
                self.context_size % len(self.layers) == 0,
                f"a context of {self.context_size} is not made of {len(self.layers)} hidden states",
            )

    @property
    def features(self) -> int:
        """Width of a feature."""
        return self.width or self.context_size

    @property
    def embedded(self) -> int:
        """Width of the embeddings that it reads."""
        return self.features if self.own_embedding else self.embedding_size

    @classmethod
    def for_target(cls, options: DrafterOptions, target: Target) -> Self:
        require_matching_output(cls.kind, target)
        require(
            options.layers in ((), (-1,)),
            f"an EAGLE drafter reads the last hidden state, layers -1, got {options.layers}",
        )
        hidden = target.hidden_size
        head_size = min(64, hidden)
        return cls(
            **target_sizes(options, target, (-1,)),
            exit_size=options.exit_size or getattr(target.config, "intermediate_size", None) or 4 * hidden,
            heads=options.heads or hidden // head_size,
            head_size=head_size,
        )

    def check_training(self, depth: int, rollouts: int) -> None:
        require(
            not rollouts,
            "an EAGLE drafter learns from whole texts, not from rollouts: give data made without --local",
        )


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(EagleConfig):
    """EAGLE-3: a network of published form, which other engines load too."""

    kind: ClassVar[str] = "eagle3"
    training_options: ClassVar[tuple[str, ...]] = ("exit_size", "blocks", "heads", "head", "draft_vocab", "layers")

    @classmethod
    def for_target(cls, options: DrafterOptions, target: Target) -> Self:
        require_matching_output(cls.kind, target)
        sizes = sizes_for(options, target, blocks=1)
        return cls(**sizes, width=target.hidden_size, projected=True, joined=True, last_norm=True)
