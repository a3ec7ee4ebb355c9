"""Reads prompts: piece by piece in recorded passes, since a launch kernel by kernel takes longer; or whole."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.kernels import compile_kernels
from redrafter.runtime.cache import Arena
from redrafter.runtime.executor import serving
from redrafter.runtime.graph import Replays, recorded
from redrafter.runtime.row import Row, logprobs_of
from redrafter.targets import Target

if TYPE_CHECKING:
    from redrafter.targets.cuda.tree_target import TreeTarget

log = logging.getLogger(__name__)

PIECES = (16, 32, 64, 128, 256, 512)
"""Tokens of a recorded pass. A shorter piece is padded; attention never sees the padding."""
SCORED = 128
"""Tokens of a pass that keeps the logits of all of them: bounds its memory."""

PROMPTS_TOGETHER, TOKENS_TOGETHER = 128, 8192
"""Whole texts read in one pass, and their tokens: bounds the memory of the pass and what padding costs."""


class PromptReader:
    """One pass for each number of tokens in `PIECES`, at any place of the batch, recorded at its first use and kept."""

    def __init__(self, verifier: "TreeTarget", cache: KVCache, layers: tuple[int, ...]) -> None:
        self.verifier, self.cache, self.layers = verifier, cache, layers
        self.pieces: dict[int, _Piece] = {}
        # A pool of its own: a recording that fails makes its memory pool unusable.
        self.memory = torch.cuda.graph_pool_handle() if verifier.target.device.type == "cuda" else None
        self.failed = False

    def read(self, place: int, tokens: Sequence[int], begin: int) -> tuple[Tensor, Tensor] | None:
        """Read the tokens behind the first `begin` of a row -> logits (1, V) after the last, hidden states (1, n, C).

        Both are valid until the next recorded pass. None if the pass cannot be recorded or does not fit the cache.
        """
        size = next((n for n in PIECES if n >= len(tokens)), None)
        if self.failed or size is None or begin + size > self.cache.slots:
            return None
        piece = self.pieces.get(size) or _Piece(size, self.verifier.target.device)
        given = [*tokens, *[0] * (size - len(tokens)), begin, place, len(tokens) - 1]
        piece.given.copy_(torch.tensor(given, pin_memory=piece.given.is_cuda), non_blocking=True)
        try:
            piece.run(self)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model, the compiler, Triton or the recording
            self.failed = True
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("%s reads prompts by passes that are not recorded (%s)", self.verifier.target.name, first)
            return None
        self.pieces[size] = piece
        return piece.logits, piece.hidden[:, : len(tokens)]


class _Piece:
    """One recorded pass; `given` are its tokens, where they begin, the row's place, and which token is the last."""

    logits: Tensor
    hidden: Tensor

    def __init__(self, size: int, device: torch.device) -> None:
        self.given = torch.zeros(size + 3, dtype=torch.long, device=device)
        self.depths = torch.arange(size, device=device)[None]
        self.graph: Replays | None = None

    def run(self, reader: PromptReader) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        with reader.verifier.target.timed("record a prompt's pass"), reader.verifier.using(reader.cache):
            if reader.verifier.forwards.fused:  # other layers would write keys of no meaning to the KV cache
                compile_kernels(lambda: self._pass(reader), self.given.device)
            if self.given.is_cuda:  # passes before the recording write what it will write again
                (self.graph,) = recorded([lambda: self._pass(reader)], reader.memory)
                self.graph.replay()
            else:
                self._pass(reader)

    def _pass(self, reader: PromptReader) -> None:
        begin, place, last = self.given[-3:].view(3, 1)
        tokens = self.given[None, :-3]
        logits, self.hidden = reader.verifier.forward(tokens, self.depths, None, begin, reader.layers, place, keep=last)
        self.logits = logits[0]


def prefill(
    target: "Target | TreeTarget",
    cache: Arena,
    tokens: Tensor,
    lengths: list[int],
    places: list[int],
    layers: tuple[int, ...],
    begin: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `Target.prefill`, for rows at these places of the batch."""
    at = torch.tensor(places, device=tokens.device)
    if not isinstance(target, Target):
        with serving(target, cache):
            return target.prefill(tokens, lengths, cache, layers, begin, at)
    if len(places) == 1:
        return target.prefill(tokens, lengths, cache.part(places[0], places[0] + 1), layers, begin)
    apart = KVCache(slots=tokens.shape[1])
    found = target.prefill(tokens, lengths, apart, layers, begin)
    cache.place(apart, at, cache.rows)
    return found


def score(
    target: "Target | TreeTarget", cache: Arena, row: Row, begin: int, stop: int, layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Read a row's tokens begin..stop-1, and keep what the target thinks of the tokens after each.

    Returns logits (1, V) after the last token and hidden states (1, stop - begin, C).
    """
    device = (target if isinstance(target, Target) else target.target).device
    tokens = torch.tensor([row.ids[begin:stop]], device=device)
    if not isinstance(target, Target):
        at, place = (torch.tensor([x], device=device) for x in (begin, row.place))
        with serving(target, cache):
            depths = torch.arange(stop - begin, device=device)[None]
            logits, hidden = target.forward(tokens, depths, None, at, layers, place)
    else:
        where = torch.arange(begin, stop, device=device)[None]
        slots = torch.arange(stop, device=device)[None]
        seen = slots[:, None, :] <= where[:, :, None]
        part = cache.part(row.place, row.place + 1)
        logits, hidden = target.forward(tokens, where, where, seen, slots, part, layers)
    following = row.ids[begin + 1 : stop + 1]  # one fewer at the prompt's end
    row.prompt_logprobs += logprobs_of(logits[0], following, row.asks_prompt or 0)
    return logits[:, -1], hidden


def together(rows: Sequence[Row], length: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Rows whose texts of this length are read in one pass, those with the longest texts first."""
    left = sorted(rows, key=length)  # alike in length: little padding
    while left:
        longest = length(left[-1])
        count = max(1, min(PROMPTS_TOGETHER, TOKENS_TOGETHER // longest, len(left)))
        left, some = left[:-count], left[-count:]
        yield some
