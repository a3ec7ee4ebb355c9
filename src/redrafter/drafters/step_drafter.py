"""The drafter as one step of a running batch sees it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.rules import BeamSearch, Search
from redrafter.core.step import Drafter, Rows
from redrafter.core.tree import Tree, root_tree
from redrafter.drafters.copied import Copied, as_chain, as_tree
from redrafter.errors import ConfigError


class StepDrafter:
    """The drafter as a step sees it. It keeps the hidden states of accepted tokens in `history` (B, S, C).

    A step that guesses nothing leaves the drafter behind; `runtime.state.BatchState.catch_up` makes up for that.
    """

    def __init__(self, drafter: Drafter, rows: Rows, history: Tensor | None, *, guesses: bool, trims: bool) -> None:
        self.drafter, self.guesses, self.trims = drafter, guesses, trims
        self.lengths, self.history = rows.lengths, history
        self.layers = drafter.layers
        self.edit: Callable[[Tree], Tree] | None = None  # changes what was guessed, before it is verified
        self.copied: Sequence[Copied] | None = None  # by row: mixed into what the drafter guesses, or verified instead

    @property
    def default_shape(self) -> Shape:
        return self.drafter.default_shape

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return self.drafter.begin(tokens, lengths, hidden, slots)

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:
        if not self.guesses:
            return root_tree(last) if self.copied is None else as_tree(self.copied, last)
        if self.copied is not None and isinstance(search, BeamSearch):
            search = replace(search, chain=as_chain(self.copied, last.device))
        tree = self.drafter.draft(state, last, search)
        if self.trims:  # the host waits for the tree anyway
            if not torch.equal(tree.tokens[:, 0], last):  # would change the text
                raise ConfigError(
                    f"{type(self.drafter).__name__}.draft must give the search the last tokens as they came, and not "
                    "overwrite them: they are the root of the tree"
                )
            tree = trimmed(tree)
        return tree if self.edit is None else self.edit(tree)

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        self.remember(hidden)
        return self.drafter.advance(state, accepted, hidden) if self.guesses else state

    def remember(self, hidden: Tensor) -> None:
        """Write hidden states (B, n, C) behind each row's length. The next step overwrites those not accepted."""
        if self.history is None or not hidden.shape[2]:
            return
        if self.history.device.type == "cpu" and self.history.dtype is torch.float32:
            # numpy: torch takes longer for few numbers, and would wake threads for a small copy.
            for row, length, new in zip(self.history.numpy(), self.lengths.tolist(), hidden.numpy(), strict=True):
                row[length : length + len(new)] = new
        else:
            # Not `scatter_`: the compiler would copy the whole history, and copy it back.
            slots = self.lengths[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
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
    )
