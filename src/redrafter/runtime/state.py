"""The tensors of the running batch: every row has a place, and the tensors never move.

A step runs over neighbouring places, which are views of these tensors. To change places, two rows swap.
"""

import copy
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.step import Drafter, Rows
from redrafter.drafters.ngram import NgramDrafter
from redrafter.drafters.with_ngrams import WithNgrams
from redrafter.errors import ConfigError
from redrafter.runtime.cache import Arena, lazy_zeros
from redrafter.runtime.row import Row, padded
from redrafter.targets import Target


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors of a batch's or a drafter's state, in a fixed order. Rows are their first axis."""
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, KVCache):
        return list(state.tensors())
    if is_dataclass(state):
        return [x for f in fields(state) for x in tensors_of(getattr(state, f.name))]
    if state is None or isinstance(state, bool | int | float | str):
        return []
    raise ConfigError(
        f"a drafter's state holds a {type(state).__name__}: it must be a dataclass of tensors whose first axis is rows"
    )


def with_tensors(state: Any, tensors: list[Tensor]) -> Any:
    """The same state with these tensors in place of its own."""
    if isinstance(state, Tensor):
        return tensors.pop(0)
    if isinstance(state, KVCache):
        made = copy.copy(state)
        made.layers = {layer: (tensors.pop(0), tensors.pop(0)) for layer in state.layers}
        return made
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{f.name: with_tensors(getattr(state, f.name), tensors) for f in fields(state)})
    return state


def assign(old: Any, new: Any) -> None:
    """Overwrite the tensors of one state by those of another."""
    if old is new:
        return
    for mine, value in zip(tensors_of(old), tensors_of(new), strict=True):
        if mine is value:
            continue
        if mine.dtype is torch.float32 and mine.device.type == "cpu":  # torch would wake threads for a drafter's memory
            np.copyto(mine.numpy(), value.numpy())
        else:
            mine.copy_(value)


class BatchState:
    """`places` rows of `slots` slots: keys and values, hidden states, what `Rows` holds, and the drafter's state.

    past: most tokens of a row's past texts, which a drafter that looks up n-grams keeps before the row's own.
    """

    def __init__(self, target: Target, drafter: Drafter, places: int, slots: int, endings: int, past: int = 0) -> None:
        device = target.device
        self.places, self.slots, self.past, self.vocab_size = places, slots, past, target.vocab_size
        self.cache = Arena(target, places, slots)
        # In each token's slot, the hidden state above it: a prompt that begins like another row's needs it too.
        width = len(drafter.layers) * target.hidden_size
        self.history = lazy_zeros((places, slots, width), target.dtype, device)  # (places, S, C)
        zeros = torch.zeros(places, dtype=torch.long, device=device)
        self.rows = Rows(
            lengths=zeros.clone(),
            last=zeros.clone(),
            seeds=zeros.clone(),
            remaining=zeros.clone(),
            done=zeros == 0,
            eos=torch.full((places, endings), -1, device=device),
            counts=None,  # allocated with the first row that has penalties
            state=None,  # allocated with the first row that drafts
        )
        self._histories: dict[tuple[int, int], Tensor] = {}
        self._views: dict[tuple[int, int, bool, bool], Rows] = {}
        self._viewed = self.rows  # what the views are of

    def view(self, start: int, stop: int, *, drafts: bool, counted: bool) -> Rows:
        """Rows start..stop-1 themselves; without the drafter's state where nothing is drafted."""
        if counted:
            self._count()
        rows, key = self.rows, (start, stop, drafts, counted)
        if self._viewed is not rows:  # tensors were allocated; the others never move
            self._views, self._viewed = {}, rows
        if key in self._views:
            return self._views[key]
        made = {f.name: getattr(rows, f.name)[start:stop] for f in fields(rows) if f.name not in ("counts", "state")}
        counts = rows.counts[start:stop] if counted and rows.counts is not None else None
        state = with_tensors(rows.state, [x[start:stop] for x in tensors_of(rows.state)]) if drafts else None
        self._views[key] = Rows(**made, counts=counts, state=state)
        return self._views[key]

    def view_history(self, start: int, stop: int) -> Tensor:
        """The hidden states of rows start..stop-1 themselves."""
        if (start, stop) not in self._histories:  # a slice takes as long as a small copy
            self._histories[start, stop] = self.history[start:stop]
        return self._histories[start, stop]

    def _count(self) -> None:
        """Allocate the token counts that penalties need; other rows' counts have no meaning and no effect."""
        if self.rows.counts is None:
            counts = torch.zeros(self.places, self.vocab_size, device=self.rows.last.device)
            self.rows = replace(self.rows, counts=counts)

    def put(self, places: Tensor, new: Rows) -> None:
        """Rows that have chosen their first token take these places (n,)."""
        if new.counts is not None:
            self._count()
        for f in fields(new):
            if f.name != "state":
                mine, own = (tensors_of(getattr(rows, f.name)) for rows in (self.rows, new))
                for whole, value in zip(mine, own, strict=False):  # rows without penalties have no counts
                    whole[places] = value
        if new.state is not None:
            self._put_state(places, new.state)

    def _put_state(self, places: Tensor, state: Any) -> None:
        """The drafter's state of rows at these places."""
        if self.rows.state is None:
            room = [x.new_zeros(self.places, *x.shape[1:]) for x in tensors_of(state)]
            self.rows = replace(self.rows, state=with_tensors(state, room))
        for whole, value in zip(tensors_of(self.rows.state), tensors_of(state), strict=True):
            if value.shape != (len(places), *whole.shape[1:]):
                raise ConfigError(
                    f"a drafter's state of {len(places)} rows holds a tensor of shape {tuple(value.shape)}: rows must "
                    f"come first, and the other sizes stay as in its first state, {tuple(whole.shape[1:])}"
                )
            whole[places] = value

    def swap(self, a: int, b: int, length: int) -> None:
        """Two rows change places; neither has more than `length` tokens in the KV cache."""
        for x in [*(x[..., :length, :] for x in self.cache.row_first()), self.history[:, :length]]:
            _swap(x, a, b)
        for x in tensors_of(self.rows):
            _swap(x, a, b)

    def copy(self, source: int, place: int, start: int, stop: int) -> None:
        """Copy slots start..stop-1 of one row to another."""
        for x in self.cache.row_first():
            x[place, ..., start:stop, :] = x[source, ..., start:stop, :]
        self.history[place, start:stop] = self.history[source, start:stop]

    def begin(self, drafter: Drafter, rows: Sequence[Row]) -> None:
        """Let the drafter read texts that it does not know, up to the last token, which `catch_up` adds."""
        device = self.history.device
        texts = padded([row.ids[: row.known] for row in rows], device)  # (n, P)
        at, lengths = (torch.tensor(x, device=device) for x in zip(*((r.place, r.known) for r in rows), strict=True))
        self._put_state(at, self.begun(drafter, rows, texts, lengths, self.history[at, : texts.shape[1]]))
        for row in rows:
            row.seen = row.known

    def begun(self, drafter: Drafter, rows: Sequence[Row], texts: Tensor, lengths: Tensor, hidden: Tensor) -> Any:
        """The drafter's state of rows whose texts (n, P) it has read."""
        state = drafter.begin(texts, lengths, hidden, self.slots)
        if not self.past or not isinstance(drafter, NgramDrafter | WithNgrams):
            return state
        past = torch.zeros(len(rows), self.past, dtype=torch.long)
        for line, row in zip(past, rows, strict=True):
            line[: len(row.past)] = torch.tensor(row.past, dtype=torch.long)
        sizes = torch.tensor([len(row.past) for row in rows])
        return drafter.recall(state, past.to(texts.device), sizes.to(texts.device))

    def catch_up(self, drafter: Drafter, rows: Sequence[Row]) -> None:
        """Let the drafter take in what rows gained in steps without a guess."""
        device = self.history.device
        for behind in {len(row.ids) - row.seen for row in rows} - {0}:
            late = [row for row in rows if len(row.ids) - row.seen == behind]
            at = torch.tensor([row.place for row in late], device=device)
            new = torch.tensor([row.ids[row.seen :] for row in late], device=device)
            first = torch.tensor([row.seen for row in late], device=device)
            slots = first[:, None] - 1 + torch.arange(behind, device=device)  # of the states that chose the tokens
            none = torch.zeros_like(new)
            accepted = Accepted(none, new, torch.full_like(at, behind), drafted=none[:, 0], nodes=none[:, 0])
            mine = with_tensors(self.rows.state, [x[at] for x in tensors_of(self.rows.state)])
            self._put_state(at, drafter.advance(mine, accepted, self.history[at[:, None], slots]))
            for row in late:
                row.seen = len(row.ids)


def _swap(x: Tensor, a: int, b: int) -> None:
    kept = x[a].clone()
    x[a] = x[b]
    x[b] = kept
