"""Steps that run part by part, and reading prompts apart from steps."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.cache import KVCache
from redrafter.core.flat import Flat, Piece, of_pieces
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter, Rows, step
from redrafter.core.transfer import put
from redrafter.core.tree import Tree
from redrafter.drafters import NoDrafter
from redrafter.runtime.copied import Copied
from redrafter.runtime.guide import RowProcessors
from redrafter.runtime.host_step import host_step, runs_on_host
from redrafter.runtime.launched import Launched
from redrafter.runtime.result_line import encoded
from redrafter.runtime.row import Row, logprobs_of, padded
from redrafter.runtime.state import BatchState, assign
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets import Target

if TYPE_CHECKING:
    from redrafter.targets.cuda.tree_target import TreeTarget

SCORED = 128
"""Tokens of a pass that keeps the logits of all of them: bounds its memory."""

PROMPTS_TOGETHER, TOKENS_TOGETHER = 128, 8192
"""Whole prompts read in one pass, and their tokens: bounds the memory of the pass and what padding costs."""


def serving(target: "Target | TreeTarget", cache: KVCache) -> AbstractContextManager[None]:
    """While in force, the tree kernel reads this KV cache; a target with its own attention is given its cache."""
    return nullcontext() if isinstance(target, Target) else target.using(cache)


class EagerSteps:
    """Steps and passes of the running batch that are not recorded.

    recorded: what verifies in recorded steps. slack: slots behind a row's end.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        state: BatchState,
        rules: Callable[[Shape], Rule],
        slack: int,
        recorded: "Target | TreeTarget | None",
    ) -> None:
        self.target, self.drafter, self.state, self.rules, self.slack = target, drafter, state, rules, slack
        self.recorded = recorded

    @property
    def verifier(self) -> "Target | TreeTarget":
        """What verifies in recorded steps if it keeps a token's bits, else the target itself."""
        found = self.recorded
        if found is None or isinstance(found, Target) or not (found.same_bits or found.compiles):
            return self.target
        return found

    def launch(
        self,
        rows: Sequence[Row],
        shape: Shape | None,
        guessing: Sequence[Row],
        copied: Mapping[Row, Copied],
        sampling: Sampling,
        keeps: bool,
    ) -> Launched:
        """A step of the rows at the first places. Some of them are `guessing`. With `keeps`, its logits are kept."""
        rows, count = sorted(rows, key=lambda row: row.place), len(rows)
        rule = self.rules(shape if shape is not None and guessing else NoDrafter.default_shape)
        guided = any(row.processor is not None for row in rows)  # a guide may plant as many nodes as fit
        chains = [copied.get(row, Copied()) for row in rows] if copied else None
        drafted = self.slack - 2 if guided else rule.nodes
        nodes = drafted if guessing else max((len(chain.tokens) for chain in chains or ()), default=0)
        assert nodes < self.slack - 1, "a chain would not fit behind a row"
        view = self.state.view(count, drafts=bool(guessing), counted=sampling.penalises)
        edit = None
        if guessing and isinstance(sampling.processor, RowProcessors):
            edit = functools.partial(sampling.processor.guess, guesses=[row in guessing for row in rows])
        drafter = StepDrafter(
            self.drafter,
            view,
            self.state.history[:count],
            follows=self.state.guesses[:count] if guessing else None,
            guesses=bool(guessing),
            trims=True,
            copied=chains,
            edit=edit,
        )
        cache = self.state.cache.part(0, count)
        cache.extent = max(row.known for row in rows) + 1 + nodes
        return self._run(view, cache, sampling, rule, drafter, keeps)

    def _run(
        self, rows: Rows, cache: KVCache, sampling: Sampling, rule: Rule, drafter: StepDrafter, keeps: bool
    ) -> Launched:
        """One step in place."""
        seen = _LogitsKept(self.verifier)
        if runs_on_host(rows, rule):
            lines, width = host_step(rows, cache, sampling, rule, drafter, seen)
        else:
            new, accepted, tree = step(rows, cache, sampling, rule, drafter, seen)
            assign(rows, new)
            lines, width = encoded(accepted, new.done, tree).tolist(), accepted.tokens.shape[1]
        return Launched(lambda: [lines], width, drafter.follows is not None, seen.logits if keeps else None)

    def read(self, rows: Sequence[Row], begin: int, stop: Callable[[Row], int]) -> None:
        """Read tokens `begin` to `stop(row)` of rows, whose first `begin` tokens the KV cache holds, in few passes."""
        cache, history, layers, target = self.state.cache, self.state.history, self.drafter.layers, self.verifier
        prompts, places = [row.ids[: stop(row)] for row in rows], [row.place for row in rows]
        if not isinstance(target, Target):
            with serving(target, cache):
                _, states = target.prefill(prompts, layers, begin, places)
            if history.shape[2]:
                for place, hidden in zip(places, states, strict=True):
                    history[place, begin : begin + len(hidden)] = hidden
            return
        tokens, lengths = padded(prompts, history.device), [len(p) for p in prompts]
        if len(rows) == 1:
            _, hidden = target.prefill(tokens, lengths, cache.part(places[0], places[0] + 1), layers, begin)
        else:
            assert begin == 0
            apart = KVCache(slots=tokens.shape[1])
            _, hidden = target.prefill(tokens, lengths, apart, layers)
            cache.place(apart, put(places, tokens.device), cache.rows)
        if hidden.shape[2]:
            history[put(places, tokens.device), begin : tokens.shape[1]] = hidden

    def score(self, row: Row, stop: int) -> None:
        """Read a row's tokens up to `stop`, and keep what the target thinks of the tokens after each."""
        cache, history, layers, target = self.state.cache, self.state.history, self.drafter.layers, self.verifier
        device, begin = history.device, row.known
        if not isinstance(target, Target):
            flat = of_pieces([Piece(row.place, begin, row.ids[begin:stop])], target.longest)
            with serving(target, cache):
                logits, hidden = target.read(Flat(put(flat.lines, device), put(flat.runs, device)), layers)
        else:
            where = torch.arange(begin, stop, device=device)[None]
            slots = torch.arange(stop, device=device)[None]
            seen = slots[:, None, :] <= where[:, :, None]
            part = cache.part(row.place, row.place + 1)
            tokens = put([row.ids[begin:stop]], device)
            (logits,), (hidden,) = target.forward(tokens, where, where, seen, slots, part, layers)
        history[row.place, begin:stop] = hidden
        row.prompt_logprobs += logprobs_of(logits, row.ids[begin + 1 : stop + 1], row.asks_prompt or 0)


class _LogitsKept:
    """The target, with the logits of its last pass at hand."""

    def __init__(self, target: "Target | TreeTarget") -> None:
        self.target = target
        self.logits: Tensor | None = None

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        with serving(self.target, cache):  # not around the whole step: a drafter may run the same model
            self.logits, hidden = self.target.verify(tree, lengths, cache, layers)
        return self.logits, hidden


def together(rows: Sequence[Row], length: Callable[[Row], int]) -> list[list[Row]]:
    """Rows whose texts of this length are read in one pass, those with the longest texts first."""
    left, parts = sorted(rows, key=length), []  # alike in length: little padding
    while left:
        longest = max(1, length(left[-1]))
        count = max(1, min(PROMPTS_TOGETHER, TOKENS_TOGETHER // longest, len(left)))
        left, some = left[:-count], left[-count:]
        parts.append(some)
    return parts
