"""Sizes of a block drafter."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from redrafter.bounds import Bounds, CountOrZero, Size
from redrafter.config import require
from redrafter.drafters.base import require_matching_output
from redrafter.drafters.decoder import DecoderConfig, sizes_for
from redrafter.drafters.options import DrafterOptions, HeadKind, Markov
from redrafter.targets import Target


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DecoderConfig):
    """Sizes of a block network, and what published ones do differently."""

    kind: ClassVar[str] = "block"
    training_options: ClassVar[tuple[str, ...]] = (
        "exit_size", "blocks", "heads", "head", "draft_vocab", "layers", "guesses", "causal", "markov",
    )  # fmt: skip

    width: Size
    """Width of the layers."""
    slots: Annotated[int, Bounds(least=2, most=256)]
    """The last token and the masks behind it, which the network reads at once."""
    mask_token: CountOrZero
    """The token whose embedding is a mask's."""
    from_last: bool = False
    """Whether the slot of the last token guesses too, so that each slot guesses the token after its own place."""
    guesses: Annotated[int, Bounds(least=1, most=256)]
    """How many tokens it guesses at once."""
    causal: bool = False
    """Whether a slot sees the slots before it alone."""
    windows: tuple[CountOrZero, ...] = ()
    """For each layer how many tokens before the last one all slots see, as `speculators` trains it; 0: all."""
    causal_windows: bool = True
    """Whether layers with a window are causal within the block."""
    markov: Markov = "none"
    """How a guess depends on the guess before it, besides the block's logits."""
    markov_rank: Size = 1
    """Width of what is known of the guess before."""
    head: HeadKind = "tied"
    """`tied` to the target's output embedding, or `own` weights."""
    own_embedding: bool = False
    """Whether it has an input embedding of its own."""
    own_mask: bool = False
    """Whether it has an embedding for masks beside that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mask_token < self.vocab_size, f"mask token {self.mask_token} is not in the vocabulary")
        most = self.slots - (not self.from_last)
        require(self.guesses <= most, f"{self.slots} slots guess at most {most} tokens, got {self.guesses}")
        require(
            len(self.windows) in (0, self.blocks),
            f"{self.blocks} layers have {len(self.windows)} windows: {self.windows}",
        )

    @property
    def embedded(self) -> int:
        """Width of the embeddings that it reads."""
        return self.width

    @classmethod
    def for_target(cls, options: DrafterOptions, target: Target) -> Self:
        """As DFlash, or with a Markov head as DSpark: then the last token's slot guesses too."""
        require_matching_output(cls.kind, target)
        sizes, from_last = sizes_for(options, target, blocks=3), options.markov != "none"
        return cls(
            **sizes,
            width=sizes["embedding_size"],
            slots=options.guesses + (not from_last),
            mask_token=target.vocab_size - 1,  # often nothing but room in the vocabulary
            from_last=from_last,
            guesses=options.guesses,
            causal=options.causal,
            head_norms=True,
            markov=options.markov,
            markov_rank=min(256, target.hidden_size) if from_last else 1,
        )

    def check_training(self, depth: int, rollouts: int) -> None:
        require(
            self.guesses == depth,
            f"a block drafter guesses {self.guesses} tokens at once and cannot learn a depth of {depth}; give --depth "
            f"{self.guesses}, or for a new drafter another number of --guesses",
        )
