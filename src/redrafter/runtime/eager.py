"""Steps that run part by part, and reading prompts apart from steps."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from redrafter.config import Shape
from redrafter.core.beam import Beam
from redrafter.core.cache import KVCache
from redrafter.core.chain import Chain
from redrafter.core.flat import Piece
from redrafter.core.rules import Rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter, Rows, Verifier, step
from redrafter.core.tree import Nodes, Tree
from redrafter.drafters import NoDrafter
from redrafter.kernels.tree_attention.naive import DEEPEST
from redrafter.runtime.copied import Copied
from redrafter.runtime.guide import RowProcessors
from redrafter.runtime.host_step import host_step, runs_on_host
from redrafter.runtime.host_tree import HostNodes
from redrafter.runtime.launched import Launched
from redrafter.runtime.result_line import encoded
from redrafter.runtime.row import Row, logprobs_of
from redrafter.runtime.state import BatchState, assign
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets.cpu.packed_pass import PackedPass, ReadsBeside
from redrafter.targets.passes import Pass

SCORED = 128
"""Tokens of a pass that keeps the logits of all of them: bounds its memory."""

PackRows = Callable[[Sequence[Row | None], HostNodes, Tensor], Tree]
"""pack(the row at each place, None where it guesses nothing, drafted nodes, last tokens (B,)): the chosen nodes."""


@dataclass(frozen=True)
class Choice:
    """The `core.rules.beam_search.HostChoice` of one step. until: see `Shape.until`."""

    pack_rows: PackRows
    order: Sequence[Row | None]  # the row at each place; None: it guesses nothing
    until: float

    def ends(self, scores: Tensor) -> bool:
        return self.until > 0 and bool((scores[:, 0].exp() < self.until).all())

    def pack(self, drafted: Beam | Nodes, chain: Chain | None, last: Tensor) -> Tree:
        return self.pack_rows(self.order, HostNodes.of(drafted, chain), last)


PROMPTS_TOGETHER, TOKENS_TOGETHER = 128, 8192
"""Whole prompts read in one pass, and their tokens: bounds the memory of the pass and what padding costs."""


class EagerSteps:
    """Steps and passes of the running batch that are not recorded. slack: slots behind a row's end."""

    def __init__(
        self, verifier: Pass, drafter: Drafter, state: BatchState, rules: Callable[[Shape], Rule], slack: int
    ) -> None:
        self.verifier, self.drafter, self.state, self.rules, self.slack = verifier, drafter, state, rules, slack

    @property
    def reads_in_steps(self) -> bool:
        """Whether pieces of prompts are read in the pass of a step."""
        return isinstance(self.verifier, PackedPass)

    def launch(
        self,
        rows: Sequence[Row],
        shape: Shape | None,
        guessing: Sequence[Row],
        copied: Mapping[Row, Copied] | None,
        pack: PackRows | None,
        sampling: Sampling,
        keeps: bool,
        beside: Mapping[Row, int],
    ) -> Launched:
        """A step of the rows at the first places. Some of them are `guessing`. With `keeps`, its logits are kept.

        beside: tokens of prompts to read in its pass, where `reads_in_steps`.
        """
        pieces = [row.piece(count) for row, count in beside.items()]
        for row, count in beside.items():
            row.known += count
        rows, count = sorted(rows, key=lambda row: row.place), len(rows)
        rule = self.rules(shape if shape is not None and guessing else NoDrafter.default_shape)
        guided = any(row.processor is not None for row in rows)  # a guide may plant as many nodes as fit
        chains = [copied.get(row, Copied()) for row in rows] if copied else None
        drafted = rule.nodes if pack is None and not guided else self.slack - 2
        nodes = drafted if guessing else max((len(chain.tokens) for chain in chains or ()), default=0)
        assert nodes < self.slack - 1, "a chain would not fit behind a row"
        view = self.state.view(count, drafts=bool(guessing), counted=sampling.penalises)
        edit = None
        if guessing and isinstance(sampling.processor, RowProcessors):
            edit = functools.partial(sampling.processor.guess, guesses=[row in guessing for row in rows])
        choice = None
        if pack is not None and shape is not None:
            choice = Choice(pack, [row if row in guessing else None for row in rows], shape.until)
        drafter = StepDrafter(
            self.drafter,
            view,
            self.state.history[:count],
            follows=self.state.guesses[:count] if guessing else None,
            guesses=bool(guessing),
            trims=True,
            deepest=None if self.verifier.flat is None else DEEPEST,
            copied=chains,
            choice=choice,
            edit=edit,
        )
        cache = self.state.cache.part(0, count)
        cache.extent = max(row.known for row in rows) + 1 + nodes
        return self._run(view, cache, sampling, rule, drafter, keeps, pieces)

    def _run(
        self,
        rows: Rows,
        cache: KVCache,
        sampling: Sampling,
        rule: Rule,
        drafter: StepDrafter,
        keeps: bool,
        pieces: Sequence[Piece],
    ) -> Launched:
        """One step in place."""
        seen = _LogitsKept(self.verifier)
        if isinstance(self.verifier, PackedPass):
            whole = self.state.cache.part(0, self.state.places)
            seen = _LogitsKept(ReadsBeside(self.verifier, whole, pieces, self._keep))
        if runs_on_host(rows, rule):
            lines, width = host_step(rows, cache, sampling, rule, drafter, seen)
        else:
            new, accepted, tree = step(rows, cache, sampling, rule, drafter, seen)
            assign(rows, new)
            lines, width = encoded(accepted, new.done, tree).tolist(), accepted.tokens.shape[1]
        logits = seen.logits if keeps else None
        return Launched(lambda: [lines], width, drafter.follows is not None, logits, draft_seconds=drafter.seconds)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Read pieces of prompts of different rows, in few passes."""
        self._keep(pieces, self.verifier.read(pieces, self.state.cache, self.drafter.layers))

    def _keep(self, pieces: Sequence[Piece], states: Sequence[Tensor]) -> None:
        """The hidden states of pieces of prompts."""
        for piece, hidden in zip(pieces, states, strict=True):
            self.state.history[piece.place, piece.begin : piece.begin + len(hidden)] = hidden

    def score(self, row: Row, piece: Piece) -> None:
        """Read a piece of a row's prompt, and keep what the target thinks of the tokens after each of its own."""
        stop = piece.begin + len(piece.tokens)
        logits, hidden = self.verifier.score(piece, self.state.cache, self.drafter.layers)
        self.state.history[row.place, piece.begin : stop] = hidden
        row.prompt_logprobs += logprobs_of(logits, row.ids[piece.begin + 1 : stop + 1], row.asks_prompt or 0)


class _LogitsKept:
    """What verifies, with the logits of its last pass at hand."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.logits: Tensor | None = None

    def verify(self, tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        self.logits, hidden = self.verifier.verify(tree, lengths, cache, layers)
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
