"""One row of the running batch as the host knows it: what was asked for, how far it is, what a pass gave it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from redrafter.bounds import Count, check
from redrafter.config import SamplingParams
from redrafter.core.flat import Piece
from redrafter.core.sampling import Processor

WORTH_COPYING = 8
"""A shorter prefix is read again rather than copied from another row."""

Logprobs = list[list[tuple[int, float]]]
"""For each token: the token itself and the most probable ones, with their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it."""

    prompt: Sequence[int]
    max_new_tokens: Count
    seed: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos: Sequence[int] = ()
    """Token ids that end the text (they are part of it)."""
    stop: Sequence[str] = ()
    """Strings that end the text (they are not part of it)."""
    shown: Sequence[int] = ()
    """Special tokens that are part of the text, such as the one that begins a tool call; others are not."""
    halts: Callable[[list[int]], bool] | None = None
    """Asked after each token, with prompt and text so far; true ends the text."""
    constraint: Any = None
    """What the text must follow: a `runtime.guide.Constraint`."""
    pads: Sequence[int] = ()
    """Ids that processors and `halts` see before the prompt: transformers counts in padded width."""

    def __post_init__(self) -> None:
        check(self)


class Row:
    """A request's place in the batch, and how far the host knows it to be."""

    def __init__(
        self,
        request: Request,
        place: int,
        *,
        drafts: bool = True,
        logprobs: int | None = None,
        reuses: bool = True,
        processor: Processor | None = None,
        past: Sequence[int] = (),
    ) -> None:
        self.request, self.place, self.past = request, place, past
        self.drafts, self.logprobs, self.reuses, self.processor = drafts, logprobs, reuses, processor
        self.ids = list(request.prompt)  # prompt and text so far
        self.known = 0  # tokens in the KV cache
        self.seen = 0  # tokens the drafter has taken in
        self.reused = 0  # prompt tokens copied from another row instead of read
        self.open = True
        self.live = False  # its prompt is read up to the last token: it takes part in steps
        self.stepped = False  # its first step was launched
        self.used = 0  # when it was last touched; the oldest closed row gives up its place first
        self.owner = ""  # whose request it is: nothing is copied from rows of others
        self.error: Exception | None = None  # what its processor raised
        self.asks_prompt: int | None = None  # most probable tokens to tell at each place of the prompt; None: nothing
        self.prompt_logprobs: Logprobs = []  # of the prompt's tokens from the second on, as far as the prompt is read

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read; its last one is the root of the first step."""
        return max(0, len(self.request.prompt) - 1 - self.known)

    def piece(self, count: int) -> Piece:
        """The next tokens to read of its prompt."""
        return Piece(self.place, self.known, self.ids[self.known : self.known + count])

    @property
    def watched(self) -> bool:
        """Whether the host takes part in its steps, so that none of them is one recorded graph."""
        return self.logprobs is not None or self.processor is not None

    @property
    def shared(self) -> int:
        """Tokens that another row can copy: a plain row keeps hidden states of its prompt only."""
        return self.known if self.drafts else min(self.known, len(self.request.prompt))


@dataclass
class RowOutput:
    """What one or more steps gave one row."""

    tokens: list[int]
    drafted: int = 0
    """How many of the tokens, from the first on, the drafter guessed."""
    done: bool = False
    nodes: int = 0
    """Drafted nodes verified."""
    steps: int = 0
    """0 for the step that gave the first token."""
    tree: tuple[list[int], list[int], list[int]] | None = None
    """Tokens and parents of the last step's tree, and the accepted path through it, root first."""
    logprobs: Logprobs | None = None
    """For each token: the token and the most probable ones, with the target's log-probabilities."""
    prompt_logprobs: Logprobs | None = None
    """The same for the prompt's tokens from the second on, with the first new token."""
    error: Exception | None = None
    """What the row's logits processor raised."""
    promised: list[float] = field(default_factory=list)
    """Nodes that should be accepted, by the draft, for each budget that the step could have had."""
    expected: float = 0.0
    """Accepted nodes that the planner expected of the step."""


def logprobs_of(logits: Tensor, tokens: list[int], top: int) -> Logprobs:
    """(n, V) logits that n tokens were chosen from -> for each, the token and the `top` most probable ones."""
    logp = logits.float().log_softmax(-1)
    best = logp.topk(top, dim=-1) if top else None
    found = []
    for i, token in enumerate(tokens):
        row = [(token, float(logp[i, token]))]
        if best is not None:
            row += list(zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True))
        found.append(row)
    return found


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5]), common_prefix([], [1]), common_prefix([1, 2], [1, 2])
    (2, 0, 2)
    """
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared in C, single tokens in Python are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def best_source(
    rows: Sequence[Row | None], row: Row, usable: Callable[[Row, int], int] | None = None
) -> tuple[Row | None, int]:
    """The row with the longest prefix of this row's prompt that is worth copying, and the length; None if none is.

    The prompt's last token is not part of it: that token is always read, for its logits. `usable` says how much of a
    row's beginning of this length can be copied, by default all.
    """
    wanted = row.ids[: len(row.request.prompt) - 1]
    best, most = None, row.known + WORTH_COPYING - 1
    for other in rows:
        if other is not None and other is not row and other.owner == row.owner:
            shared = common_prefix(other.ids[: other.shared], wanted)
            shared = shared if usable is None else usable(other, shared)
            if shared > most:
                best, most = other, shared
    return best, most
