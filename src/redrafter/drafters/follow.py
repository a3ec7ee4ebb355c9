"""The recurrent drafter under somebody else's scheduler: a state for each request, one chain of guesses.

An engine that schedules by itself computes pieces of prompts, drops requests and takes them up again, skips what its
prefix cache holds, and moves rows about. All it has to say here is which positions a pass computed for which request.
Pairs of the memory are counted by position, so none is taken twice and a missing one costs a guess, never more.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.beam import Advance, State, beam_search
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.tree import Nodes, Tree, candidate_nodes, pack
from redrafter.drafters.recurrent import Context, RecurrentDrafter
from redrafter.errors import ConfigError


@dataclass(frozen=True)
class Computed:
    """What one pass of the target computed for one request, n of whose tokens are decided after it."""

    request: str
    owner: object  # another object under the same name is another request
    tokens: Tensor  # (n,) integers on the CPU: all that is decided, prompt included
    start: int  # position of the first token computed
    hidden: Tensor  # (m, C) of the positions from there on; those of refused guesses may stand last
    guess: bool  # whether its last token was chosen in this pass, so that guesses are wanted

    @property
    def known(self) -> int:
        """How many positions, from the text's first on, have a hidden state and the token it chose."""
        return min(self.start + len(self.hidden), len(self.tokens) - 1)


@dataclass
class Followed:
    """What is kept of a request between passes."""

    owner: object
    seen: int  # pairs up to this position are in the memory, but for those that were never computed here
    memory: Tensor | None  # (heads, size, size)


@dataclass(frozen=True)
class BestPath:
    """A `Search` that keeps one chain: the best path of the beam, for as long as it is at least so probable."""

    shape: Shape
    least: float
    vocab_size: int
    dtype: torch.dtype  # of the scores

    @property
    def visited(self) -> int:
        return self.shape.width * self.shape.length

    def tree(self, advance: Advance[State], state: State, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        rows, width, length = last.shape[0], self.shape.width, self.shape.length
        none = torch.zeros(1, dtype=self.dtype, device=last.device)
        beam = beam_search(
            advance,
            state,
            last,
            width=width,
            length=length,
            temperature=none.expand(rows),
            noise=none.expand(rows, length + 1, self.vocab_size),
            token_ids=token_ids,
        )
        at = torch.zeros_like(last)[:, None]
        path = []
        for depth in reversed(range(length)):
            path.append((beam.tokens[:, depth].gather(1, at), beam.scores[:, depth].gather(1, at)))
            at = beam.parents[:, depth].gather(1, at)
        tokens, scores = (torch.stack(x[::-1], dim=-1) for x in zip(*path, strict=True))  # (B, 1, L)
        return self.candidates(tokens, scores, last)

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        floor = math.log(self.least) if self.least > 0 else -math.inf
        nodes: Nodes = candidate_nodes(beam[:, :1], scores[:, :1].masked_fill(scores[:, :1] < floor, -math.inf))[0]
        return pack(nodes, last, self.shape.length)[0]

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        raise ConfigError("a chain is followed through a recurrent drafter only")


class Follower:
    """Takes in what was computed, gives back one chain of guesses for each request that wants one."""

    def __init__(self, drafter: RecurrentDrafter, shape: Shape, least: float = 0.0) -> None:
        if not 0 <= least < 1:
            raise ConfigError(f"the least probability of a guess must be in [0, 1), got {least}")
        self.drafter = drafter
        scores = torch.promote_types(drafter.vocabulary.dtype, torch.float32)
        self.search = BestPath(shape, least, drafter.net.config.vocab_size, scores)
        self.followed: dict[str, Followed] = {}

    def keep(self, alive: Iterable[str]) -> None:
        """Forget all requests but these."""
        for request in self.followed.keys() - set(alive):
            del self.followed[request]

    @torch.no_grad()
    def step(self, computed: Sequence[Computed]) -> list[list[int]]:
        """One list of guesses for each; empty where none is wanted."""
        self._remember(computed)
        wanting = [i for i, c in enumerate(computed) if c.guess]
        guesses: list[list[int]] = [[] for _ in computed]
        if wanting:
            for i, chain in zip(wanting, self._chains([computed[i] for i in wanting]), strict=True):
                guesses[i] = chain
        return guesses

    def _chains(self, computed: Sequence[Computed]) -> list[list[int]]:
        chose = torch.stack([c.hidden[len(c.tokens) - 2 - c.start] for c in computed])  # (B, C)
        last = torch.stack([c.tokens[-1] for c in computed]).to(chose.device, torch.long)
        memories = [self.followed[c.request].memory for c in computed]
        memory = torch.stack([m for m in memories if m is not None]) if self.drafter.net.memory is not None else None
        tree = self.drafter.draft(Context(self.drafter.net.context(chose), memory), last, self.search)
        tokens, sure = tree.tokens[:, 1:].tolist(), tree.valid[:, 1:].tolist()
        return [[t for t, ok in zip(*row, strict=True) if ok] for row in zip(tokens, sure, strict=True)]

    def _remember(self, computed: Sequence[Computed]) -> None:
        """Steps are short and go together; pieces of prompts are long, and each goes alone."""
        new = [(c, followed, max(followed.seen, c.start)) for c in computed for followed in [self._of(c)]]
        if self.drafter.net.memory is not None:
            few = self.search.shape.length + 1
            steps = [x for x in new if 0 < x[0].known - x[2] <= few]
            for group in ([steps] if steps else []) + [[x] for x in new if x[0].known - x[2] > few]:
                self._add(group)
        for c, followed, _ in new:
            followed.seen = max(followed.seen, c.known)

    def _add(self, group: Sequence[tuple[Computed, Followed, int]]) -> None:
        net = self.drafter.net
        assert net.memory is not None
        count = [c.known - first for c, _, first in group]
        device = group[0][0].hidden.device
        hidden = group[0][0].hidden.new_zeros(len(group), max(count), net.config.context_size)
        tokens = torch.zeros(len(group), max(count), dtype=torch.long)
        for row, ((c, _, first), n) in enumerate(zip(group, count, strict=True)):
            hidden[row, :n] = c.hidden[first - c.start : first - c.start + n]
            tokens[row, :n] = c.tokens[first + 1 : first + 1 + n]
        before = torch.stack([f.memory for _, f, _ in group if f.memory is not None])
        after = self.drafter.remember(before, tokens.to(device), hidden, torch.tensor(count, device=device))
        for (_, followed, _), memory in zip(group, after, strict=True):
            followed.memory = memory

    def _of(self, c: Computed) -> Followed:
        """Its state: a new one if it is new, or if it has lost tokens since."""
        found = self.followed.get(c.request)
        if found is None or found.owner is not c.owner or found.seen > len(c.tokens) - 1:
            memory = self.drafter.net.memory
            empty = None if memory is None else memory.empty(1)[0]
            found = self.followed[c.request] = Followed(c.owner, 0, empty)
        return found
