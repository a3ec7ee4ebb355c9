"""What a user can set about the training of a drafter. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import Literal

from redrafter.config import require

LossName = Literal["hard", "soft", "acceptance"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the drafter is trained. An *update* is one step of the optimiser; its size is counted in answer positions."""

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
