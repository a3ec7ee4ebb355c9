"""The tensors of the running batch: every row has a place, and the tensors never move.

A step runs over neighbouring places, which are views of these tensors. To change places, two rows swap.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.noise import as_int64
from redrafter.core.recurrence import RecurrentMemory
from redrafter.core.rows import map_tensors
from redrafter.core.sampling import penalises
from redrafter.core.step import Drafter, Rows
from redrafter.core.transfer import padded, put
from redrafter.drafters.traits import recall_of
from redrafter.errors import ConfigError
from redrafter.runtime.cache import Arena, lazy_zeros
from redrafter.runtime.row import Row
from redrafter.targets import Target

T = TypeVar("T")


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors of a batch's or a drafter's state, in a fixed order. Rows are their first axis."""
    _check(state)
    found: list[Tensor] = []

    def see(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(state, see)
    return found


def with_tensors(state: T, tensors: Sequence[Tensor]) -> T:
    """The same state with these tensors in place of its own."""
    left = iter(tensors)
    return map_tensors(state, lambda _: next(left))


def _check(state: Any) -> None:
    if is_dataclass(state) and not isinstance(state, type):
        for field in fields(state):
            _check(getattr(state, field.name))
    elif not (state is None or isinstance(state, Tensor | KVCache | bool | int | float | str)):
        raise ConfigError(
            f"a drafter's state holds a {type(state).__name__}: it must be a dataclass of tensors whose first axis is "
            "rows"
        )


def holds_cache(state: Any) -> bool:
    """Whether a KV cache is part of a drafter's state, or of a state inside it."""
    return isinstance(state, KVCache) or (is_dataclass(state) and any(map(holds_cache, vars(state).values())))


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
        self.guesses = zeros > 0  # rows whose drafter knows their text
        self._views: dict[tuple[int, bool, bool], Rows] = {}
        self._viewed = self.rows  # what the views are of

    def view(self, count: int, *, drafts: bool, counted: bool) -> Rows:
        """The first rows themselves; without the drafter's state where nothing is drafted."""
        if counted:
            self._count()
        rows, key = self.rows, (count, drafts, counted)
        if self._viewed is not rows:  # tensors were allocated; the others never move
            self._views, self._viewed = {}, rows
        if key not in self._views:
            kept = replace(rows, counts=rows.counts if counted else None, state=rows.state if drafts else None)
            self._views[key] = map_tensors(kept, lambda x: x[:count])
        return self._views[key]

    def _count(self) -> None:
        """Allocate the token counts that penalties need; other rows' counts have no meaning and no effect."""
        if self.rows.counts is None:
            counts = torch.zeros(self.places, self.vocab_size, device=self.rows.last.device)
            self.rows = replace(self.rows, counts=counts)

    def admit(self, rows: Sequence[Row], context: int) -> None:
        """Rows whose prompts are read up to the last token, which becomes the root of their first step."""
        endings = self.rows.eos.shape[1]
        table = []
        for row in rows:
            r, prompt = row.request, len(row.request.prompt)
            most = min(r.max_new_tokens, context - prompt)
            eos = [*r.eos, *[-1] * (endings - len(r.eos))]
            table.append([row.place, prompt - 1, r.prompt[-1], as_int64(r.seed), most, *eos])
        columns = put(table, self.rows.last.device).T
        places = columns[0]
        for whole, value in zip(
            (self.rows.lengths, self.rows.last, self.rows.seeds, self.rows.remaining), columns[1:5], strict=True
        ):
            whole[places] = value
        self.rows.eos[places] = columns[5:].T
        self.rows.done.index_fill_(0, places, False)  # not `[places] = False`: torch would wait for all steps under way
        self.guesses.index_fill_(0, places, False)
        penalised = [row for row in rows if penalises(row.request.sampling)]
        if penalised:
            self._count()
        for row in penalised:
            assert self.rows.counts is not None
            text = put(row.request.prompt, self.rows.last.device)
            counts = self.rows.counts[row.place].zero_()  # not `bincount`, which waits for the device
            counts.scatter_add_(0, text, torch.ones_like(text, dtype=counts.dtype))

    def allocate(self, drafter: Drafter) -> None:
        """Make room for the drafter's state. Rows that it does not know yet have that of a text of one token."""
        if self.rows.state is None:
            token = torch.zeros(1, 1, dtype=torch.long, device=self.history.device)
            hidden = self.history.new_zeros(1, 1, self.history.shape[2])
            state = self._recalled(drafter, [()], drafter.begin(token, token[0] + 1, hidden, self.slots))
            room = [x.repeat_interleave(self.places, 0) for x in tensors_of(state)]
            self.rows = replace(self.rows, state=with_tensors(state, room))

    def _put_state(self, places: Tensor, drafter: Drafter, state: Any) -> None:
        """The drafter's state of rows at these places."""
        self.allocate(drafter)
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
        for x in [*tensors_of(self.rows), *self.cache.recurrent.tensors(), self.guesses]:
            _swap(x, a, b)

    def copy(self, source: int, place: int, start: int, stop: int) -> None:
        """Copy slots start..stop-1 of one row to another."""
        for x in self.cache.row_first():
            x[place, ..., start:stop, :] = x[source, ..., start:stop, :]
        self.history[place, start:stop] = self.history[source, start:stop]

    def put_recurrent(self, place: int, state: RecurrentMemory) -> None:
        """The recurrent state of one row."""
        self.cache.recurrent.place(state, put([place], self.rows.last.device))

    def begin(self, drafter: Drafter, rows: Sequence[Row]) -> None:
        """Let the drafter read texts that it does not know, up to the last token, which its `advance` adds."""
        device = self.history.device
        known = [max(row.known, len(row.request.prompt)) for row in rows]
        texts = padded([row.ids[:n] for row, n in zip(rows, known, strict=True)], device)  # (n, P)
        at, lengths = put([[row.place for row in rows], known], device)
        state = drafter.begin(texts, lengths, self.history[at, : texts.shape[1]], self.slots)
        self._put_state(at, drafter, self._recalled(drafter, [row.past for row in rows], state))
        self.guesses.index_fill_(0, at, True)
        for row, n in zip(rows, known, strict=True):
            row.seen = n

    def _recalled(self, drafter: Drafter, texts: Sequence[Sequence[int]], state: Any) -> Any:
        """The drafter's state with the rows' past texts, where the drafter copies from them."""
        recall = recall_of(drafter)
        if not self.past or recall is None:
            return state
        device = self.history.device
        past = [[*text, *[0] * (self.past - len(text))] for text in texts]
        return recall(state, put(past, device), put([len(text) for text in texts], device))

    def catch_up(self, drafter: Drafter, rows: Sequence[Row]) -> None:
        """Let the drafter take in what rows gained in steps without a guess."""
        device = self.history.device
        for behind in {len(row.ids) - row.seen for row in rows} - {0}:
            late = [row for row in rows if len(row.ids) - row.seen == behind]
            at, first = put([[row.place for row in late], [row.seen for row in late]], device)
            new = put([row.ids[row.seen :] for row in late], device)
            slots = first[:, None] - 1 + torch.arange(behind, device=device)  # of the states that chose the tokens
            none = torch.zeros_like(new)
            accepted = Accepted(none, new, torch.full_like(at, behind), drafted=none[:, 0], nodes=none[:, 0])
            mine = _copied(self.rows.state, at)
            self._put_state(at, drafter, drafter.advance(mine, accepted, self.history[at[:, None], slots]))
            for row in late:
                row.seen = len(row.ids)


def _copied(state: T, places: Tensor) -> T:
    """The state of the rows at these places."""
    return map_tensors(state, lambda x: x[places])


def _swap(x: Tensor, a: int, b: int) -> None:
    kept = x[a].clone()
    x[a] = x[b]
    x[b] = kept
