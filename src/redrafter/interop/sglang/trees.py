"""Drafted trees for a batch that another engine schedules: the drafter's states and trees by slot.

The engine gives every running request a slot and reports what its passes computed. A slot holds the drafter's state and
the tree for the request's next step. All of them stay on the device; a step needs no value on the host. A request that
is read again, under the same name or in another slot, gets a new state. A state that misses tokens, such as those of a
cached prefix, makes guesses worse and never changes a text: the target's choices alone decide the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from redrafter.config import RuleConfig, Shape, require
from redrafter.core.accept import Accepted
from redrafter.core.rules import Rule, make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter
from redrafter.core.transfer import put
from redrafter.core.tree import Tree, root_tree, widened
from redrafter.drafters.ngram import NgramState
from redrafter.drafters.traits import longest_chain
from redrafter.drafters.with_ngrams import WithNgrams, WithNgramsState, find_chain
from redrafter.runtime.state import tensors_of, with_tensors

PADDING = 4
"""Prompt pieces are read together while padding makes them at most this many times larger."""


@dataclass(frozen=True)
class Piece:
    """Tokens of one request that a pass of the target has read."""

    slot: int
    request: str
    text: Tensor  # (n,) on the CPU: the request's tokens from position 0 to the end of this piece
    start: int  # position of the first token read; earlier ones were cached, or read by an earlier pass
    following: int | None = None  # the prompt's next token; None: the pass chose the next token

    @property
    def count(self) -> int:
        return len(self.text) - self.start


@dataclass(frozen=True)
class Requests:
    """The requests of one batch, in the batch's order."""

    slots: Tensor  # (B,)
    lengths: Tensor  # (B,) tokens in the KV cache; also the position of the last token
    seeds: Tensor  # (B,)
    sampling: Sampling


class TreeBatch:
    """Reads what passes computed and drafts the next tree of every request.

    `shapes` are the sizes of tree to choose from, the largest first; None verifies the last token alone.
    """

    def __init__(
        self,
        drafter: Drafter,
        shapes: Sequence[Shape | None],
        *,
        slots: int,
        window: int,
        context_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        sizes = [nodes_of(s) for s in shapes]
        require(sizes == sorted(sizes, reverse=True) and sizes[0] > 0, f"give the largest shape first, got {sizes}")
        self.drafter, self.shapes, self.window, self.vocab_size = drafter, list(shapes), window, vocab_size
        self.device = torch.device(device)
        self.nodes = sizes[0] + 1
        self.depth = min(sizes[0], max([longest_chain(drafter), *(s.length for s in shapes if s is not None)]))
        self.rules = [make_rule(RuleConfig(), s or Shape(width=1, length=1), vocab_size, dtype) for s in shapes]
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        nothing = torch.zeros(1, 1, context_size, dtype=dtype, device=self.device)
        with torch.no_grad():
            self.empty = drafter.begin(zero, zero[0] + 1, nothing, window + 2 * (self.depth + 1))
        room = slots + 1  # the last one is for the rows that pad a recorded batch
        self.spare = slots
        self.state = with_tensors(self.empty, [x.expand(room, *x.shape[1:]).clone() for x in tensors_of(self.empty)])
        empty = widened(root_tree(zero[0].expand(room)), self.nodes - 1)
        fields = (empty.tokens, empty.parents, empty.depths, empty.valid, empty.mask)
        self.kept = [x.clone() for x in fields]
        self.reading: dict[int, tuple[str, int]] = {}  # slot -> the request whose prompt is partly read, and how far

    def tree(self, slots: Tensor, size: int) -> Tree:
        """The trees drafted for these slots, cut or filled up to the nodes of this size of tree."""
        n = nodes_of(self.shapes[size]) + 1
        tokens, parents, depths, valid = (x[slots, :n] for x in self.kept[:4])
        return Tree(tokens, parents, depths, valid, self.kept[4][slots, :n, :n], length=min(n - 1, self.depth))

    def accept(self, requests: Requests, size: int, tree: Tree, logits: Tensor) -> Accepted:
        """What the rule `seeded` accepts: logits (B, N+1, V), after penalties and masks."""
        rule = self.rules[size]
        return rule.accept(self._search(requests, rule), tree, logits, None)

    @torch.no_grad()
    def read(
        self, pieces: Sequence[Piece], hidden: Tensor, chosen: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take in the prompt pieces of one pass but for the last token of each: hidden states (tokens, C), chosen (B,).

        The last token's state and the token after it are returned as `follow` takes them: tokens, count and hidden
        states of a step with one new token. So drafting after a prompt is the drafting after a step.
        """
        goes_on = [self.reading.get(p.slot) == (p.request, p.start) for p in pieces]
        for p in pieces:
            self.reading.pop(p.slot, None)
            if p.following is not None:
                self.reading[p.slot] = (p.request, len(p.text))
        counts = [p.count for p in pieces]
        parts = torch.split(hidden[: sum(counts)], counts)  # a recorded pass may have padded it
        longest = max(counts)
        together = [range(len(pieces))]
        if longest * len(pieces) > PADDING * sum(counts):
            together = [range(i, i + 1) for i in range(len(pieces))]
        for some in together:
            group = slice(some.start, some.stop)
            self._read(pieces[group], parts[group], goes_on[group], slots[group])
        last = chosen.long()
        if any(p.following is not None for p in pieces):
            known = put([-1 if p.following is None else p.following for p in pieces], self.device)
            last = torch.where(known < 0, last, known)
        states = torch.stack([part[-1] for part in parts])
        return last[:, None], torch.ones_like(last), states[:, None]

    def _read(self, pieces: Sequence[Piece], hidden: Sequence[Tensor], goes_on: list[bool], slots: Tensor) -> None:
        after = pad_sequence([p.text[p.start + 1 :].long() for p in pieces], batch_first=True)
        ends = [p.text[-(self.window // 2) :].long() for p in pieces]
        sizes = torch.tensor([[p.count - 1 for p in pieces], [len(end) for end in ends]])
        parts = [*sizes, after, pad_sequence(ends, batch_first=True)]  # copied to the device at once
        sent = torch.split(put(torch.cat([x.flatten() for x in parts]), self.device), [x.numel() for x in parts])
        count, length, tokens, text = (x.view(part.shape) for x, part in zip(sent, parts, strict=True))
        rows = self._before(goes_on, slots)
        mixed = self.drafter if isinstance(self.drafter, WithNgrams) else None
        state, drafter = (rows, self.drafter) if mixed is None else (rows.inner, mixed.inner)
        if after.shape[1]:
            none = torch.zeros_like(tokens)
            accepted = Accepted(none, tokens, count, none[:, 0], none[:, 0])
            states = pad_sequence([part[:-1] for part in hidden], batch_first=True)
            own = with_tensors(state, [x.clone() for x in tensors_of(state)])  # a drafter may overwrite its state
            state = drafter.advance(own, accepted, states)
        if mixed is not None:  # cached prefixes are part of the text
            room = self.empty.text.tokens.shape[1] - text.shape[1]
            texts = NgramState(pad(text, (0, room)), length.clone())  # kernels are compiled anew for odd addresses
            state = WithNgramsState(state, texts, *find_chain(texts), rows.hits)
        self._keep(slots, state)

    @torch.no_grad()
    def follow(self, requests: Requests, tokens: Tensor, count: Tensor, hidden: Tensor, size: int) -> None:
        """Take in a step and draft the next one. `requests.lengths` are those after the step.

        `tokens` (B, D) are the step's new tokens, the first `count` (B,) of them real; `hidden` (B, D, C) chose them.
        """
        none = torch.zeros_like(tokens)
        accepted = Accepted(none, tokens, count, none[:, 0], none[:, 0])
        rows = self.drafter.advance(self._rows(requests.slots), accepted, hidden)
        if isinstance(rows, WithNgramsState):  # a text that fills the window goes on at the window's end
            text = replace(rows.text, lengths=rows.text.lengths.clamp(max=self.window))
            rows = replace(rows, text=text)
        self._keep(requests.slots, rows)
        self._draft(rows, tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0], requests, size)

    def _draft(self, rows: Any, last: Tensor, requests: Requests, size: int) -> None:
        shape, rule = self.shapes[size], self.rules[size]
        tree = root_tree(last)
        if shape is not None:
            tree = self.drafter.draft(rows, last, self._search(requests, rule))
        full = widened(tree, self.nodes - 1)
        new = (full.tokens, full.parents, full.depths, full.valid, full.mask)
        for mine, value in zip(self.kept, new, strict=True):
            mine[requests.slots] = value

    def _search(self, requests: Requests, rule: Rule) -> Any:
        return rule.search(requests.sampling, requests.seeds, requests.lengths)

    def _rows(self, slots: Tensor) -> Any:
        return with_tensors(self.state, [x[slots] for x in tensors_of(self.state)])

    def _before(self, goes_on: list[bool], slots: Tensor) -> Any:
        """The states of requests whose prompt is read on; for the others, the state before any token."""
        if all(goes_on):
            return self._rows(slots)
        empty = [x.expand(len(goes_on), *x.shape[1:]) for x in tensors_of(self.empty)]
        if any(goes_on):
            goes = put(goes_on, self.device)
            pairs = zip(tensors_of(self.state), empty, strict=True)
            empty = [torch.where(goes.view(-1, *[1] * (e.dim() - 1)), x[slots], e) for x, e in pairs]
        return with_tensors(self.empty, empty)

    def _keep(self, slots: Tensor, rows: Any) -> None:
        for mine, value in zip(tensors_of(self.state), tensors_of(rows), strict=True):
            mine[slots] = value.to(mine.dtype)


def nodes_of(shape: Shape | None) -> int:
    """How many drafted nodes a tree of this shape has."""
    return 0 if shape is None else shape.budget
