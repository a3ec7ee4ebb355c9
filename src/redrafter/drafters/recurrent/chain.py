"""The recurrent drafter under an external scheduler: one state per request, one chain of guesses per step.

An engine with its own scheduler computes prompts in pieces, preempts and resumes requests, skips what its prefix cache
holds, and moves rows about. Here it reports which positions a pass computed for which request. Pairs of the memory are
counted by position: none is added twice, and a pair that was never computed here only makes guesses worse.

All state is on the device, in a slot per request. A step copies one table of integers to the device and one table of
guesses back, whatever the number of requests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.transfer import put
from redrafter.drafters.recurrent.chain_slots import ChainInputs, ChainSlots
from redrafter.drafters.recurrent.drafter import RecurrentDrafter
from redrafter.errors import ConfigError

PADDING = 4
"""Prompt pieces are read together while padding makes them at most this many times larger."""
COLUMNS = 5
"""Integers before a row's text: slot, new pairs, new tokens, length of the text, where its hidden states begin."""


@dataclass(frozen=True, slots=True)
class RequestPass:
    """What one pass of the target computed for one request. Passes are in the order of their hidden states."""

    request: str
    owner: object  # the request itself: another object under the same name is another request
    tokens: np.ndarray  # (n,) all decided tokens after this pass, prompt included
    start: int  # position of the first token computed
    count: int  # tokens computed; those of rejected guesses may come last
    guess: bool  # whether this pass chose the last token, so that guesses are wanted

    @property
    def paired(self) -> int:
        """How many positions, from 0 on, have a hidden state and the token it chose."""
        return min(self.start + self.count, len(self.tokens) - 1)


@dataclass(slots=True)
class RequestState:
    """What the host keeps of a request between passes."""

    owner: object
    slot: int
    remembered: int  # the memory holds the pairs before this position, except those never computed here
    decided: int  # tokens that were decided when the last chain was drafted


Piece = tuple[int, int, np.ndarray]
"""Pairs of a prompt: the slot, where their hidden states begin, and their tokens."""


class ChainDrafter:
    """Takes the passes of all requests and returns one chain of guesses for each request that wants one.

    `slots` is the largest number of requests in a pass. Of requests that are left out of a pass, some may be forgotten.
    """

    def __init__(
        self,
        drafter: RecurrentDrafter,
        shape: Shape,
        min_probability: float = 0.0,
        ngrams: bool = False,
        slots: int = 256,
    ) -> None:
        self.slots = ChainSlots(drafter, shape, slots, min_probability, ngrams)
        self.device = self.slots.device
        self.requests: dict[str, RequestState] = {}
        self.free = list(range(slots))
        table = torch.zeros(slots, COLUMNS + self.slots.window, dtype=torch.int32)
        self.table = table.pin_memory() if self.device.type == "cuda" else table
        self.rows = self.table.numpy()  # the same memory
        self.follow: Callable[[int, Tensor, bool], Tensor | None] = self.follow_eagerly
        """Takes in the first rows of the table, given all hidden states, and drafts or not. May be replaced by
        recordings."""

    def keep(self, alive: Iterable[str]) -> None:
        """Forget all requests but these."""
        for request in self.requests.keys() - set(alive):
            self.free.append(self.requests.pop(request).slot)

    @torch.no_grad()
    def step(self, passes: Sequence[RequestPass], hidden: Tensor, draft: bool = True) -> list[list[int]]:
        """One list of guesses for each request; empty where none is wanted, or everywhere without `draft`.

        `hidden` (m, C) holds the hidden states of all passes, one after the other, and perhaps more.
        """
        fresh, pieces, wanting = list[int](), list[Piece](), list[int]()
        most, at = self.slots.pairs, 0
        for i, p in enumerate(passes):
            state = self._state(p, passes, fresh)
            paired = p.paired
            first = max(state.remembered, p.start)
            count = paired - first
            if count > most or (count > 0 and not p.guess):
                pieces.append((state.slot, at + first - p.start, p.tokens[first + 1 : paired + 1]))
                count = 0
            state.remembered = max(state.remembered, paired)
            if p.guess:
                count = max(count, 0)
                self._fill(len(wanting), p, state, count, at + paired - p.start - max(count, 1))
                wanting.append(i)
                if draft:
                    state.decided = len(p.tokens)
            at += p.count
        if fresh:
            self.slots.clear(put(fresh, self.device))
        if pieces:
            self._read(pieces, hidden)
        guesses: list[list[int]] = [[] for _ in passes]
        found = self.follow(len(wanting), hidden, draft) if wanting else None
        if found is not None:
            for i, chain in zip(wanting, found.tolist(), strict=True):
                guesses[i] = [token for token in chain if token >= 0]
        return guesses

    def _fill(self, row: int, p: RequestPass, state: RequestState, count: int, first: int) -> None:
        """A row of the table."""
        length = min(len(p.tokens), self.slots.window)
        new = len(p.tokens) - state.decided
        mine = self.rows[row]
        mine[:COLUMNS] = (state.slot, count, new if new <= length else 0, length, first)
        mine[COLUMNS : COLUMNS + length] = p.tokens[-length:]

    def _read(self, pieces: Sequence[Piece], hidden: Tensor) -> None:
        """Add prompts to the memories."""
        counts = [len(tokens) for _, _, tokens in pieces]
        if max(counts) * len(pieces) > PADDING * sum(counts) and len(pieces) > 1:
            for piece in pieces:
                self._read([piece], hidden)
            return
        numbers = np.zeros((len(pieces), 3 + max(counts)), dtype=np.int64)
        for row, (slot, first, tokens) in zip(numbers, pieces, strict=True):
            row[:3] = (slot, first, len(tokens))
            row[3 : 3 + len(tokens)] = tokens
        given = put(numbers, self.device)
        slots, begin, count = (given[:, i].contiguous() for i in range(3))
        self.slots.read(slots, given[:, 3:].contiguous(), picked(hidden, begin, count, max(counts)), count)

    def follow_eagerly(self, rows: int, hidden: Tensor, draft: bool) -> Tensor | None:
        """(rows, L) guesses; -1: none. Without `draft` the memories alone follow the text."""
        table = self.table[:rows].to(self.device, non_blocking=True)
        given = inputs_of(table, picked(hidden, table[:, COLUMNS - 1].long(), table[:, 1].long(), self.slots.pairs))
        if draft:
            return self.slots.step(given)
        self.slots.remember(given)
        return None

    def _state(self, p: RequestPass, passes: Sequence[RequestPass], fresh: list[int]) -> RequestState:
        """The request's state: a new one if the request is new, or if it has lost tokens since."""
        found = self.requests.get(p.request)
        if found is None or found.owner is not p.owner or found.remembered > len(p.tokens) - 1:
            slot = self._free_slot(passes) if found is None else found.slot
            found = self.requests[p.request] = RequestState(p.owner, slot, 0, len(p.tokens))
            fresh.append(slot)
        return found

    def _free_slot(self, passes: Sequence[RequestPass]) -> int:
        if not self.free:
            running = {p.request for p in passes}
            gone = next((name for name in self.requests if name not in running), None)
            if gone is None:
                raise ConfigError(
                    f"{len(passes)} requests at once are more than the drafter's {self.slots.spare} slots"
                )
            self.free.append(self.requests.pop(gone).slot)
        return self.free.pop()


def picked(hidden: Tensor, first: Tensor, count: Tensor, most: int) -> Tensor:
    """(B, most, C): `count` (B,) hidden states from `first` (B,) on, and the last of them again.

    Never those of another request: the memory multiplies unused states by 0, and 0 times NaN is NaN.
    """
    place = torch.minimum(torch.arange(most, device=first.device), (count - 1).clamp(min=0)[:, None])
    return hidden[(first[:, None] + place).clamp(max=len(hidden) - 1)]  # rows that pad a recording may name any


def inputs_of(table: Tensor, hidden: Tensor) -> ChainInputs:
    """The table's integers by name."""
    slots, count, new, length = table[:, : COLUMNS - 1].long().unbind(1)
    return ChainInputs(hidden, slots, count, new, length, table[:, COLUMNS:].long())
