"""The drafter as one step of a running batch sees it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rules import BeamSearch, Search
from redrafter.core.rules.beam_search import HostChoice
from redrafter.core.step import Drafter, Rows
from redrafter.core.tree import Tree, root_tree, within
from redrafter.errors import ConfigError
from redrafter.kernels.tree_attention.naive import DEEPEST
from redrafter.runtime.copied import Copied, as_chain, as_tree


class StepDrafter:
    """The drafter as a step sees it. It keeps the hidden states of accepted tokens in `history` (B, S, C).

    follows: the rows (B,) whose texts the drafter knows: they guess where the step `guesses`, and the drafter takes in
    their new tokens. None: the step leaves the drafter behind, and `runtime.state.BatchState.catch_up` makes up for
    that. trims: drop columns of the tree that are empty in all rows, for which the host waits. deepest: depth of the
    deepest node that is verified. copied: by row, mixed into what the drafter guesses, or verified instead.
    choice: of the host among the drafter's nodes. edit: changes what was guessed.
    """

    def __init__(
        self,
        drafter: Drafter,
        rows: Rows,
        history: Tensor | None,
        *,
        follows: Tensor | None,
        guesses: bool,
        trims: bool = False,
        deepest: int | None = None,
        copied: Sequence[Copied] | None = None,
        choice: HostChoice | None = None,
        edit: Callable[[Tree], Tree] | None = None,
    ) -> None:
        self.drafter, self.follows, self.guesses = drafter, follows, guesses
        self.trims, self.deepest, self.copied, self.choice, self.edit = trims, deepest, copied, choice, edit
        self.seconds = 0.0  # of this thread in the last draft
        self.lengths, self.done, self.history = rows.lengths, rows.done, history
        self.layers = drafter.layers

    @property
    def default_shape(self) -> Shape:
        return self.drafter.default_shape

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return self.drafter.begin(tokens, lengths, hidden, slots)

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:
        if not self.guesses:
            tree = root_tree(last) if self.copied is None else as_tree(self.copied, last)
            return tree if self.edit is None else self.edit(tree)
        if self.copied is not None and isinstance(search, BeamSearch):
            search = replace(search, chain=as_chain(self.copied, last.device))
        if self.choice is not None and isinstance(search, BeamSearch):
            search = replace(search, choice=self.choice)
        assert self.follows is not None
        began = time.thread_time()
        tree = self.drafter.draft(state, last, search)
        self.seconds = time.thread_time() - began
        most = tree.length if self.deepest is None else min(self.deepest, tree.length)
        if most < tree.length and tree.draft_logits is not None:
            raise ConfigError(
                f"a beam of the rule rejection is at most {DEEPEST} tokens long in recorded steps, got {tree.length}: "
                f"use --length {DEEPEST} or less, or --runtime eager"
            )
        if self.trims:  # the host waits for the tree anyway
            if not torch.equal(tree.tokens[:, 0], last):  # would change the text
                raise ConfigError(
                    f"{type(self.drafter).__name__}.draft must give the search the last tokens as they came, and not "
                    "overwrite them: they are the root of the tree"
                )
            if most < tree.length or not bool(self.follows.all()):
                tree = within(tree, torch.where(self.follows, most, 0))
            tree = trimmed(tree)
        else:
            tree = within(tree, torch.where(self.follows, most, 0))
        return tree if self.edit is None else self.edit(tree)

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        self.remember(hidden)
        return self.follow(state, accepted, hidden)

    def follow(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        """The drafter's state with the new tokens of the rows that it knows: another row's state never grows."""
        if self.follows is None:
            return state
        count = torch.where(self.follows, accepted.count, 0)
        return self.drafter.advance(state, replace(accepted, count=count), hidden)

    def remember(self, hidden: Tensor) -> None:
        """Write hidden states (B, n, C) behind each row's length. The next step overwrites those not accepted.

        A row that is done may be read meanwhile: its states go to the last slot, which is no token's.
        """
        if self.history is None or not hidden.shape[2]:
            return
        if self.history.device.type == "cpu" and self.history.dtype is torch.float32:
            # numpy: torch takes longer for few numbers, and would wake threads for a small copy.
            lengths, done = self.lengths.tolist(), self.done.tolist()
            for row, length, over, new in zip(self.history.numpy(), lengths, done, hidden.numpy(), strict=True):
                if not over:
                    row[length : length + len(new)] = new
        else:
            # Not `scatter_`: the compiler would copy the whole history, and copy it back.
            slots = self.lengths[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
            slots = torch.where(self.done[:, None], self.history.shape[1] - 1, slots)
            self.history[torch.arange(len(hidden), device=hidden.device)[:, None], slots] = hidden

    def keep(self, state: Any, rows: Tensor) -> Any:
        return self.drafter.keep(state, rows)


def trimmed(tree: Tree) -> Tree:
    """Without the columns that are empty in every row: a CPU pays for each."""
    n = max(map(sum, tree.valid.tolist()))
    if n == tree.tokens.shape[1]:
        return tree
    return replace(
        tree,
        tokens=tree.tokens[:, :n],
        parents=tree.parents[:, :n],
        depths=tree.depths[:, :n],
        valid=tree.valid[:, :n],
        mask=tree.mask[:, :n, :n],
        scores=None if tree.scores is None else tree.scores[:, :n],
    )
