"""Chains for an engine that keeps texts, lengths and slots on the device. No value is copied to the host.

The engine has already written a step's new tokens into its texts when it asks for the next guesses.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from redrafter.core.transfer import put
from redrafter.drafters.recurrent.chain import PADDING, picked
from redrafter.drafters.recurrent.chain_slots import ChainInputs, ChainSlots
from redrafter.interop.vllm.recorded_chains import Record, on_gpu
from redrafter.runtime.graph import Replays

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """What the engine holds of each slot."""

    tokens: Tensor  # (slots, S)
    lengths: Tensor  # (slots,)


@dataclass(frozen=True)
class Reading:
    """A row of a batch that reads a prompt or a piece of it."""

    row: int
    slot: int
    first: int  # its first hidden state in the pass
    start: int  # position of its first token
    count: int


@dataclass(frozen=True)
class Recorded:
    """The tensors that a recording reads and writes."""

    slots: Tensor  # (B,)
    count: Tensor  # (B,) new pairs
    hidden: Tensor  # (B, P, C)


class DeviceChains:
    """Follows the texts of all slots and drafts after each step."""

    def __init__(self, slots: ChainSlots, texts: Texts, batches: Sequence[int], record: Record = on_gpu) -> None:
        self.slots, self.texts, self.device = slots, texts, slots.device
        self._record = record
        self.place = torch.arange(slots.window, device=self.device)
        size, dtype = slots.drafter.net.config.context_size, slots.drafter.target.dtype
        self.given = {
            batch: Recorded(
                torch.full((batch,), slots.spare, device=self.device),
                torch.zeros(batch, dtype=torch.long, device=self.device),
                torch.zeros(batch, slots.pairs, size, dtype=dtype, device=self.device),
            )
            for batch in sorted(batches, reverse=True)
        }
        self.guesses: dict[int, Tensor] = {}
        self.graphs: dict[tuple[int, bool], Replays] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """A GPU that cannot record drafts eagerly."""

        def follow(batch: int, draft: bool) -> None:
            mine = self.given[batch]
            found = self._follow(mine.slots, mine.count, mine.hidden, draft)
            if found is not None:
                self.guesses[batch] = found

        kinds = [(batch, draft) for batch in self.given for draft in (True, False)]
        try:
            graphs = self._record([partial(follow, *kind) for kind in kinds])
            self.graphs = dict(zip(kinds, graphs, strict=True))
        except RuntimeError as error:
            log.warning("redrafter: drafting is not recorded and runs eagerly: %s", error)

    @torch.inference_mode()
    def step(
        self,
        slots: Tensor,
        first: Tensor,
        count: Tensor,
        hidden: Tensor,
        fresh: Sequence[int],
        reading: Sequence[Reading],
        draft: bool = True,
    ) -> Tensor:
        """Take in a pass over B rows and return (B, L) guesses; zeros without `draft`.

        Row i has slot `slots[i]` and `count[i]` new tokens, which were chosen by the hidden states (tokens, C) from
        `first[i]` on. Rows in `reading` compute a prompt instead. Slots in `fresh` belong to new requests.
        """
        rows = len(slots)
        slots, first, count = slots.long(), first.long(), count.long()
        if fresh:
            self.slots.clear(put(list(fresh), self.device))
        if reading:
            self._read(reading, hidden)
            # A prompt's pairs are in the memory now; its last hidden state alone is left to draft from.
            ends, steps = [0] * rows, [1] * rows
            for r in reading:
                ends[r.row], steps[r.row] = r.count - 1, 0
            more = put([ends, steps], self.device)
            first, count = first + more[0], count * more[1]
        states = picked(hidden, first, count, self.slots.pairs)
        batch = min((b for b, _ in self.graphs if b >= rows), default=0)
        if batch == 0:
            found = self._follow(slots, count, states, draft)
        else:
            mine = self.given[batch]
            if rows < batch:
                mine.slots[rows:].fill_(self.slots.spare)
            mine.slots[:rows].copy_(slots)
            mine.count[:rows].copy_(count)
            mine.hidden[:rows].copy_(states)
            self.graphs[batch, draft].replay()
            found = self.guesses[batch][:rows] if draft else None
        if found is None:
            return torch.zeros(rows, self.slots.search.shape.length, dtype=torch.long, device=self.device)
        return found

    def _follow(self, slots: Tensor, count: Tensor, hidden: Tensor, draft: bool) -> Tensor | None:
        at = slots.clamp(max=self.slots.spare - 1)  # the engine has no spare slot
        total = self.texts.lengths[at].long()
        length = total.clamp(max=self.slots.window)
        places = ((total - length)[:, None] + self.place).clamp(max=self.texts.tokens.shape[1] - 1)
        text = self.texts.tokens[at[:, None], places].long()
        given = ChainInputs(hidden, slots, count, count, length, text)
        if draft:
            return self.slots.step(given).clamp(min=0)  # the engine wants a token in every place
        self.slots.remember(given)
        self.slots.match.index_fill_(0, slots, 0)  # no chain was copied, so none is counted
        return None

    def _read(self, reading: Sequence[Reading], hidden: Tensor) -> None:
        """Add prompts to the memories. The token after each piece is in the engine's text already."""
        longest, counts = max(r.count for r in reading), sum(r.count for r in reading)
        if longest * len(reading) > PADDING * counts and len(reading) > 1:
            for one in reading:
                self._read([one], hidden)
            return
        columns = zip(*((r.slot, r.first, r.start, r.count) for r in reading), strict=True)
        slots, first, start, count = put([list(x) for x in columns], self.device)
        places = start[:, None] + 1 + torch.arange(longest, device=self.device)
        tokens = self.texts.tokens[slots[:, None], places.clamp(max=self.texts.tokens.shape[1] - 1)].long()
        self.slots.read(slots.contiguous(), tokens, picked(hidden, first, count, longest), count.contiguous())
