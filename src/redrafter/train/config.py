"""Options of the training of a drafter and of its training data. Values are checked on creation.


The command line reads these classes for its help texts, so this file imports neither torch nor transformers.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from redrafter.bounds import Bounds, Count, CountOrZero, NotNegative, Positive, check

LossName = Literal["hard", "soft", "acceptance", "seeded"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the drafter is trained. An *update* is one step of the optimiser; its size is counted in answer positions."""

    updates: Count = 8000
    """Optimiser updates."""
    minutes: Annotated[float, Bounds(above=0, most=365 * 24 * 60)] | None = None
    """Minutes from the start to the end of the command, in place of `updates`: the learning rate falls to zero in this
    time."""
    positions: Count = 8192
    """Positions an update learns from; each guesses `depth` tokens ahead."""
    micro_batch: Count | None = None
    """Positions computed at once (default: all of an update's); halved by itself when memory runs out."""
    together: Count = 4
    """Updates whose hidden states the target computes in one pass."""
    depth: Annotated[int, Bounds(least=1, most=256)] = 6
    """How many tokens ahead it learns to guess."""
    loss: LossName = "soft"
    """`hard`: the token written; `soft`: KL to the target's distribution; `acceptance`: −log of Σ min(p, q); `seeded`:
    the target's choice under random noise, guessed under the same noise."""
    depth_decay: Positive = 0.9
    """Weight of each depth, relative to the one before."""
    feature_loss: NotNegative = 1.0
    """eagle: weight of the distance (smooth L1) between features and guesses of them, beside the loss."""
    lr: Positive = 2e-3
    """Learning rate after the warm-up; it falls to zero along a cosine."""
    warmup: CountOrZero = 200
    """Updates until the learning rate is reached."""
    weight_decay: NotNegative = 0.01
    """AdamW's."""
    clip: Positive = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Of the first weights and of the order of the texts."""
    held_out: Count = 128
    """Texts kept out of training, on which tokens/step is simulated."""
    evaluate_every: Count | None = None
    """Updates between two simulations (default: a tenth of all)."""
    patience: CountOrZero = 6
    """Simulations without a better tokens/step after which training stops (0: never)."""
    checkpoint_every: Count = 250
    """Updates between two checkpoints."""
    states: Literal["memory", "recompute", "cache"] | None = None
    """The target's hidden states: keep what fits in the GPU's `memory`, `recompute` them for each update, or `cache`
    them on disk (default: memory on a GPU, else recompute)."""
    chunk: Count | None = None
    """Positions whose logits over the vocabulary exist at once (default: 8192 on a GPU, else 512)."""
    bf16: bool | None = None
    """Compute the drafter in bf16 (default: on a GPU)."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def evaluation_interval(self) -> int:
        return self.evaluate_every or max(1, self.updates // 10)


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """How much training data is made, and how."""

    texts: Count = 100_000
    """How many texts; with a file of prompts only, at most as many as it holds."""
    max_new_tokens: Count = 256
    """Longest answer, in tokens."""
    prompt_tokens: Count = 128
    """Longest user's turn that the target writes itself."""
    longest_prompt: Count = 1792
    """Longer prompts, counted with the chat template, are skipped."""
    tasks: Annotated[int, Bounds(least=0, most=100)] = 50
    """Percent of self-written prompts that set a task on a text, continue a chat or begin with given words."""
    temperatures: Annotated[tuple[NotNegative, ...], Bounds(least=1)] = (0.0, 1.0)
    """Answers are written at these in turn."""
    seed: int = 0
    """Same seed, same data."""
    shard: Count | None = None
    """Texts in one file; a killed run loses the unfinished one (when not given: 8192 on a GPU, 256 on a CPU)."""
    batch: Count | None = None
    """Texts written at once (when not given: 2048 on a GPU, 16 on a CPU)."""
    local: Annotated[int, Bounds(least=0, most=256)] = 0
    """Tokens that the target goes on greedily after each token of each text (0: none)."""

    def __post_init__(self) -> None:
        check(self)
