"""One step: draft, pack, verify, accept, commit. Start reading here.

The drafter guesses a tree of tokens behind each row's last token, the root. One pass of the target gives the logits of
all nodes; the rule accepts a path of them, and the cache and the drafter take it in.

A pass is a flat list of tokens, one line each (`core.flat`): all valid nodes of all rows, one behind the other. Where
prompts are read in the same pass, their pieces are more lines. A row that does not draft is a tree with nothing but its
root. `runtime` runs the same step in parts that are recorded as CUDA graphs.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.rules import Rule, Search
from redrafter.core.sampling import Sampling
from redrafter.core.tree import Tree, root_tree


@dataclass(frozen=True)
class Rows:
    """The state of a batch between steps. Each row has its own length, seed and end."""

    lengths: Tensor  # (B,) tokens in the cache; also the position of the last token
    last: Tensor  # (B,) the last token: decided, not yet in the cache
    seeds: Tensor  # (B,)
    remaining: Tensor  # (B,) tokens still allowed
    done: Tensor  # (B,) bool
    eos: Tensor  # (B, E) token ids that end the row, padded with -1
    counts: Tensor | None  # (B, V) occurrences of each token, kept only where penalties need them
    state: Any  # the drafter's


class Drafter(Protocol):
    """What drafts. Its state is a dataclass of tensors of fixed shape whose first axis is rows.

    What all rows share belongs in the drafter itself. A drafter may have a `name` to be shown by, and
    attributes that `drafters/traits.py` reads; all of them have defaults.
    """

    @property
    def default_shape(self) -> Shape:
        """How much to draft if the user does not say."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's hidden states that the context is made of; empty if the drafter reads none."""

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        """Read the text so far: tokens (B, P) padded on the right, lengths (B,), hidden states (B, P, C).

        The text is the prompt, or the prompt and what was written before the first draft, without its last token: that
        one comes by `advance`, which is always called before `draft`. What is behind a row's length has no meaning.

        No row ever becomes longer than `slots`, its tree included.
        """

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:
        """Draft what follows `last` (B,), the newest token that `advance` was given, as a packed tree.

        `search` makes the tree. Give it `last` unchanged: it is the tree's root.
        """

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        """Read the new tokens; `hidden[:, j]` (B, n, C) is the hidden state that chose `accepted.tokens[:, j]`.

        n is L+1 after a draft and any number after steps without one, which may come together. Only the first `count`
        tokens of a row are real. The given state may be overwritten.
        """

    def keep(self, state: Any, rows: Tensor) -> Any:
        """Drop all rows but these: `core.rows.keep_rows`. The running batch moves the state's tensors by itself."""


class Verifier(Protocol):
    """What gives a tree the logits of the model whose text is written."""

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Tree -> logits (B, N+1, V) and hidden states (B, N+1, C). Its keys go to the slots from `lengths` (B,) on."""


def step(
    rows: Rows, cache: KVCache, sampling: Sampling, rule: Rule, drafter: Drafter, verifier: Verifier
) -> tuple[Rows, Accepted, Tree]:
    """One step for all rows: the new rows, what was accepted, and the tree that was verified."""
    search = rule.search(sampling, rows.seeds, rows.lengths)
    tree = drafter.draft(rows.state, rows.last, search)
    logits, hidden = verifier.verify(tree, rows.lengths, cache, drafter.layers)
    accepted = rule.accept(search, tree, logits, rows.counts)
    return *settle(rows, cache, drafter, accepted, hidden), tree


def first_tokens(
    rows: Rows, sampling: Sampling, rule: Rule, drafter: Drafter, logits: Tensor, hidden: Tensor
) -> tuple[Rows, Accepted]:
    """The second half of a step with an empty tree: what the pass over whole prompts chose.

    `logits` (B, V) after each row's end, hidden states (B, P, C); the last tokens stand at `rows.lengths`.
    """
    search = rule.search(sampling, rows.seeds, rows.lengths)
    accepted = rule.accept(search, root_tree(rows.last), logits[:, None], rows.counts)
    at_end = hidden.gather(1, rows.lengths[:, None, None].expand(-1, 1, hidden.shape[2]))
    nothing = KVCache(slots=0)  # the last token's keys are where they belong
    return settle(rows, nothing, drafter, accepted, at_end)


def settle(rows: Rows, cache: KVCache, drafter: Drafter, accepted: Accepted, hidden: Tensor) -> tuple[Rows, Accepted]:
    """The second half of a step: cut at the row's end, commit the path, advance the drafter."""
    accepted, done = cut(accepted, rows)
    cache.commit(rows.lengths, accepted.path, accepted.count)
    if hidden.shape[1] > 1:  # else the root alone, which is its own path
        hidden = hidden.gather(1, accepted.path[:, :, None].expand(-1, -1, hidden.shape[2]))
    state = drafter.advance(rows.state, accepted, hidden)
    final = accepted.tokens.gather(1, (accepted.count - 1).clamp(min=0)[:, None])[:, 0]
    rows = replace(
        rows,
        lengths=rows.lengths + accepted.count,
        last=torch.where(accepted.count > 0, final, rows.last),
        remaining=rows.remaining - accepted.count,
        done=done,
        counts=None if rows.counts is None else add_counts(rows.counts, accepted),
        state=state,
    )
    return rows, accepted


def cut(accepted: Accepted, rows: Rows) -> tuple[Accepted, Tensor]:
    """Shorten the accepted tokens to the row's budget and to the first end-of-sequence token."""
    place = torch.arange(accepted.tokens.shape[1], device=accepted.tokens.device)
    ends = (accepted.tokens[:, :, None] == rows.eos[:, None]).any(-1)  # (B, L+1)
    first_end = torch.where(ends, place, accepted.tokens.shape[1]).amin(-1)
    count = torch.minimum(torch.minimum(accepted.count, first_end + 1), rows.remaining)
    count = torch.where(rows.done, 0, count)
    done = rows.done | (first_end < count) | (count == rows.remaining)
    return replace(accepted, count=count), done


def add_counts(counts: Tensor, accepted: Accepted) -> Tensor:
    """(B, V) occurrences, with the new tokens counted."""
    new = torch.arange(accepted.tokens.shape[1], device=counts.device) < accepted.count[:, None]
    return counts.scatter_add(1, accepted.tokens, new.to(counts.dtype))
