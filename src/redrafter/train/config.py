"""Options of the training of a drafter and of its training data. Values are checked on creation.


The command line reads these classes for its help texts, so this file imports neither torch nor transformers.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from redrafter.config import require

LossName = Literal["hard", "soft", "acceptance", "seeded"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the drafter is trained. An *update* is one step of the optimiser; its size is counted in answer positions."""

    updates: int = 8000
    """Optimiser updates."""
    minutes: float | None = None
    """Minutes for data and training, in place of `updates`: the learning rate falls to zero in this time."""
    positions: int = 8192
    """Positions an update learns from; each guesses `depth` tokens ahead."""
    micro_batch: int | None = None
    """Positions computed at once (default: all of an update's); halved by itself when memory runs out."""
    together: int = 4
    """Updates whose hidden states the target computes in one pass."""
    depth: int = 6
    """How many tokens ahead it learns to guess."""
    loss: LossName = "soft"
    """`hard`: the token written; `soft`: KL to the target's distribution; `acceptance`: −log of Σ min(p, q); `seeded`:
    the target's choice under random noise, guessed under the same noise."""
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
    states: Literal["memory", "recompute", "cache"] | None = None
    """The target's hidden states: keep what fits in the GPU's `memory`, `recompute` them for each update, or `cache`
    them on disk (default: memory on a GPU, else recompute)."""
    chunk: int | None = None
    """Positions whose logits over the vocabulary exist at once (default: 8192 on a GPU, else 512)."""
    bf16: bool | None = None
    """Compute the drafter in bf16 (default: on a GPU)."""

    def __post_init__(self) -> None:
        for name in ("updates", "positions", "together", "depth", "held_out", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.minutes is None or self.minutes > 0, f"minutes must be positive, got {self.minutes}")
        for name in ("micro_batch", "evaluate_every", "chunk"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
        for name in ("warmup", "patience", "weight_decay", "feature_loss"):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("lr", "clip", "depth_decay"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        for name, allowed in (("loss", get_args(LossName)), ("states", (None, "memory", "recompute", "cache"))):
            value = getattr(self, name)
            require(value in allowed, f"{name} must be one of {', '.join(filter(None, allowed))}, got {value!r}")

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
    longest_prompt: int = 1792
    """Longer prompts, counted with the chat template, are skipped."""
    tasks: int = 50
    """Percent of self-written prompts that set a task on a text, continue a chat or begin with given words."""
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
        require(0 <= self.tasks <= 100, f"tasks must be a percentage, got {self.tasks}")
        require(self.local >= 0, f"local must be 0 (off) or more, got {self.local}")
