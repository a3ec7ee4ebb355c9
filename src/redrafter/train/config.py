"""Options of a drafter to be trained, of its training and of its training data. Values are checked on creation.

The command line reads these classes for its help texts, so this file imports neither torch nor transformers.
"""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from redrafter.config import (
    Cell,
    DrafterConfig,
    DrafterKind,
    EagleConfig,
    FirstState,
    HeadKind,
    MedusaConfig,
    RecurrentConfig,
    require,
)

if TYPE_CHECKING:
    from redrafter.targets import Target

LossName = Literal["hard", "soft", "acceptance"]
COMMON = ("drafter", "exit_size", "blocks", "heads", "draft_vocab", "layers")
"""Options that not only the recurrent drafter has."""


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """The drafter's shape, where it does not follow from the target."""

    drafter: DrafterKind = "recurrent"
    """`recurrent`, or a peer: `medusa` (a network for each depth) or `eagle` (a transformer layer)."""
    cell: Cell = "gated"
    """`rnn` (the papers'), `gated` or `none`."""
    first_state: FirstState = "context"
    """State before the last token is read: from its `embedding` (the papers'), `zero` or the `context`."""
    state_size: int | None = None
    """Width of the recurrent state (default: 1024, or the target's hidden size if that is larger)."""
    exit_size: int | None = None
    """Width of the residual blocks (default: the state's; medusa: the hidden state's); eagle: of the MLP."""
    blocks: int | None = None
    """Residual blocks before the head (default: 4; medusa: 1 at each depth)."""
    heads: int | None = None
    """medusa: how many networks, the same as --depth (default 6); eagle: attention heads (default: one for each 64)."""
    head: HeadKind = "tied"
    """`tied` to the target's output embedding, or `own` weights."""
    draft_vocab: int = 16384
    """Guess only among the k tokens most frequent in the data (0: all)."""
    layers: tuple[int, ...] = ()
    """Hidden states the context is made of, -1 the last (default: an early, the middle and the last one)."""
    memory_heads: int = 4
    """Heads of a memory over the accepted text (0: none)."""
    memory_size: int = 128
    """Width of the memory's keys and values."""
    normed: bool = True
    """Scale hidden states, embeddings and what enters each block to unit size."""

    def __post_init__(self) -> None:
        require(self.draft_vocab >= 0, f"draft_vocab must be 0 (all tokens) or more, got {self.draft_vocab}")
        for name in ("state_size", "exit_size"):
            size = getattr(self, name)
            require(size is None or size >= 1, f"{name} must be at least 1, got {size}")
        kinds = get_args(DrafterKind)
        require(self.drafter in kinds, f"drafter must be one of {', '.join(kinds)}, got {self.drafter!r}")
        if self.drafter != "recurrent":
            for field in fields(self):
                require(
                    field.name in COMMON or getattr(self, field.name) == field.default,
                    f"--{field.name.replace('_', '-')} belongs to the recurrent drafter, not to {self.drafter}",
                )

    def shape(self, target: "Target") -> DrafterConfig:
        """All sizes spelled out for a target."""
        sizes: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "embedding_size": target.input_embedding.weight.shape[1],
            "draft_vocab_size": self.draft_vocab if 0 < self.draft_vocab < target.vocab_size else None,
        }
        if self.drafter == "recurrent":
            return self._recurrent(target, sizes)
        own = target.output_embedding.weight.shape[1]
        require(
            own == target.hidden_size,
            f"{self.drafter} needs an output embedding of the hidden states' width, {target.hidden_size}, got {own}",
        )
        layers = self.layers or (-1,)
        sizes |= {"context_size": target.hidden_size * len(layers), "layers": layers}
        if self.drafter == "medusa":
            exit_size, blocks = self.exit_size or target.hidden_size, 1 if self.blocks is None else self.blocks
            return MedusaConfig(exit_size=exit_size, blocks=blocks, heads=self.heads or 6, **sizes)
        head = min(64, target.hidden_size)
        inner = self.exit_size or getattr(target.config, "intermediate_size", None) or 4 * target.hidden_size
        return EagleConfig(exit_size=inner, heads=self.heads or target.hidden_size // head, head_size=head, **sizes)

    def _recurrent(self, target: "Target", sizes: dict[str, Any]) -> RecurrentConfig:
        count = target.layer_count
        layers = self.layers or (*sorted({min(2, count - 1), count // 2}), -1)
        for layer in layers:
            require(
                -count - 1 <= layer <= count,
                f"layers names hidden state {layer}, but {target.name} has {count} layers (0..{count}, -1 the last)",
            )
        embedding = sizes["embedding_size"]
        state = self.state_size or max(1024, target.hidden_size)
        if self.first_state == "embedding" or self.cell == "none":
            require(
                self.state_size in (None, embedding),
                f"first_state={self.first_state}, cell={self.cell} need the embedding's state_size, {embedding}",
            )
            state = embedding
        return RecurrentConfig(
            **sizes,
            context_size=target.hidden_size * len(layers),
            state_size=state,
            exit_size=self.exit_size or state,
            blocks=4 if self.blocks is None else self.blocks,
            cell=self.cell,
            first_state=self.first_state,
            head=self.head,
            layers=layers,
            normed=self.normed,
            memory_heads=self.memory_heads,
            memory_size=self.memory_size,
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the drafter is trained. What an *update* learns from is counted in positions of answers."""

    updates: int = 8000
    """Optimiser updates."""
    positions: int = 8192
    """Positions an update learns from; each guesses `depth` tokens ahead."""
    micro_batch: int | None = None
    """Positions computed at once (default: all of an update's); halved by itself when memory runs out."""
    together: int = 4
    """Updates whose hidden states the target computes in one pass."""
    depth: int = 6
    """How many tokens ahead it learns to guess."""
    loss: LossName = "soft"
    """`hard`: the token written; `soft`: KL to the target's distribution; `acceptance`: −log of Σ min(p, q)."""
    depth_decay: float = 0.9
    """Weight of each depth, relative to the one before."""
    feature_loss: float = 1.0
    """eagle: weight of the distance (smooth L1) between features and guesses of them, beside the loss."""
    lr: float = 2e-3
    """Learning rate after the warm-up; it falls to zero along a cosine."""
    warmup: int = 200
    """Updates until the learning rate is reached."""
    weight_decay: float = 0.01
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of the first weights and of the order of the texts."""
    held_out: int = 128
    """Texts kept out of training, on which tokens/step is simulated."""
    evaluate_every: int | None = None
    """Updates between two simulations (default: a tenth of all)."""
    patience: int = 6
    """Simulations without a better tokens/step after which training stops (0: never)."""
    checkpoint_every: int = 250
    """Updates between two checkpoints."""
    states: Literal["recompute", "cache"] = "recompute"
    """The target's hidden states: `recompute` them for each update, or `cache` them on disk at first use."""
    chunk: int | None = None
    """Positions whose logits over the vocabulary exist at once (default: 8192 on a GPU, else 512)."""
    bf16: bool | None = None
    """Compute the drafter in bf16 (default: on a GPU)."""

    def __post_init__(self) -> None:
        for name in ("updates", "positions", "together", "depth", "held_out", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("micro_batch", "evaluate_every", "chunk"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
        for name in ("warmup", "patience", "weight_decay", "feature_loss"):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("lr", "clip", "depth_decay"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        for name, allowed in (("loss", ("hard", "soft", "acceptance")), ("states", ("recompute", "cache"))):
            value = getattr(self, name)
            require(value in allowed, f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    @property
    def evaluation_interval(self) -> int:
        return self.evaluate_every or max(1, self.updates // 10)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """How much training data is made, and how."""

    texts: int = 100_000
    """How many texts; with a file of prompts only, at most as many as it holds."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    prompt_tokens: int = 128
    """Longest user's turn that the target writes itself."""
    longest_prompt: int = 512
    """Longer prompts, counted with the chat template, are skipped."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Answers are written at these in turn."""
    seed: int = 0
    """Same seed, same data."""
    shard: int | None = None
    """Texts in one file; a killed run loses the unfinished one (when not given: 8192 on a GPU, 256 on a CPU)."""
    batch: int | None = None
    """Texts written at once (when not given: 2048 on a GPU, 16 on a CPU)."""
    local: int = 0
    """Tokens that the target goes on greedily after each token of each text (0: none)."""

    def __post_init__(self) -> None:
        for name in ("texts", "max_new_tokens", "prompt_tokens", "longest_prompt", "shard", "batch"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
        require(bool(self.temperatures), "temperatures must name at least one")
        for temperature in self.temperatures:
            require(0 <= temperature < math.inf, f"temperatures must be 0 or more, got {temperature}")
        require(self.local >= 0, f"local must be 0 (off) or more, got {self.local}")
