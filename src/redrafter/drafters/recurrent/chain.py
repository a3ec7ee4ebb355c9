"""The recurrent drafter under an external scheduler: one state per request, one chain of guesses per step.

An engine with its own scheduler computes prompts in pieces, preempts and resumes requests, skips what its prefix cache
holds, and moves rows about. Here it reports which positions a pass computed for which request. Pairs of the memory are
counted by position: none is added twice, and a pair that was never computed here only makes guesses worse.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.beam import Advance, Grow, State, beam_search
from redrafter.core.chain import Chain
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.tree import Nodes, Tree, candidate_nodes, pack
from redrafter.drafters.ngram import NgramState
from redrafter.drafters.recurrent.drafter import RecurrentDrafter, RecurrentState
from redrafter.drafters.with_ngrams import PRIOR, chain_odds, find_chain, odds_table, updated_hits
from redrafter.errors import ConfigError


@dataclass(frozen=True)
class RequestPass:
    """What one pass of the target computed for one request."""

    request: str
    owner: object  # the request itself: another object under the same name is another request
    tokens: Tensor  # (n,) integers on the CPU: all decided tokens after this pass, prompt included
    start: int  # position of the first token computed
    hidden: Tensor  # (m, C) hidden states from `start` on; those of rejected guesses may come last
    guess: bool  # whether this pass chose the last token, so that guesses are wanted

    @property
    def paired(self) -> int:
        """How many positions, from 0 on, have a hidden state and the token it chose."""
        return min(self.start + len(self.hidden), len(self.tokens) - 1)


@dataclass(frozen=True)
class Copied:
    """One row of `WithNgramsState`, and how many tokens were decided when the chain was found."""

    decided: int
    chain: Tensor  # (D,)
    match: Tensor  # ()
    hits: Tensor  # (2,)


@dataclass
class RequestState:
    """What is kept of a request between passes."""

    owner: object
    remembered: int  # the memory holds the pairs before this position, except those never computed here
    memory: Tensor | None  # (heads, size, size)
    copied: Copied | None = None  # what n-grams guessed last


@dataclass(frozen=True)
class ChainSearch:
    """A `Search` that returns one chain: the best path of the beam, while its probability is at least a minimum."""

    shape: Shape
    min_probability: float
    vocab_size: int
    dtype: torch.dtype  # of the scores
    chain: Chain | None = None  # of n-grams, mixed in

    @property
    def visited(self) -> int:
        return self.shape.width * self.shape.length

    def tree(
        self,
        advance: Advance[State],
        state: State,
        last: Tensor,
        token_ids: Tensor | None = None,
        grow: Grow | None = None,
    ) -> Tree:
        rows, width, length = last.shape[0], self.shape.width, self.shape.length
        zero = torch.zeros(1, dtype=self.dtype, device=last.device)
        beam = beam_search(
            advance,
            state,
            last,
            width=width,
            length=length,
            temperature=zero.expand(rows),
            noise=zero.expand(rows, length + 1, self.vocab_size),
            token_ids=token_ids,
            chain=self.chain,
        )
        at = torch.zeros_like(last)[:, None]
        path = []
        for depth in reversed(range(length)):
            path.append((beam.tokens[:, depth].gather(1, at), beam.scores[:, depth].gather(1, at)))
            at = beam.parents[:, depth].gather(1, at)
        tokens, scores = (torch.stack(x[::-1], dim=-1) for x in zip(*path, strict=True))  # (B, 1, L)
        return self.candidates(tokens, scores, last)

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        floor = math.log(self.min_probability) if self.min_probability > 0 else -math.inf
        nodes: Nodes = candidate_nodes(beam[:, :1], scores[:, :1].masked_fill(scores[:, :1] < floor, -math.inf))[0]
        return pack(nodes, last, self.shape.length)[0]

    def fixed(self, logits: Tensor, tree: FixedTree, last: Tensor, token_ids: Tensor | None = None) -> Tree:
        raise ConfigError("only a recurrent drafter drafts chains for another engine")


class ChainDrafter:
    """Takes the passes of all requests and returns one chain of guesses for each request that wants one.

    With `ngrams`, the text's own n-grams are mixed in: the chain is the more probable of the drafter's and the copied
    one, or one that leaves the copied text halfway.
    """

    def __init__(
        self, drafter: RecurrentDrafter, shape: Shape, min_probability: float = 0.0, ngrams: bool = False
    ) -> None:
        if not 0 <= min_probability < 1:
            raise ConfigError(f"the least probability of a guess must be in [0, 1), got {min_probability}")
        self.drafter = drafter
        self.odds = odds_table().to(drafter.vocabulary.device) if ngrams else None
        if ngrams:
            drafter.read_every_token()
        scores = torch.promote_types(drafter.vocabulary.dtype, torch.float32)
        self.search = ChainSearch(shape, min_probability, drafter.net.config.vocab_size, scores)
        self.requests: dict[str, RequestState] = {}

    def keep(self, alive: Iterable[str]) -> None:
        """Forget all requests but these."""
        for request in self.requests.keys() - set(alive):
            del self.requests[request]

    @torch.no_grad()
    def step(self, passes: Sequence[RequestPass]) -> list[list[int]]:
        """One list of guesses for each request; empty where none is wanted."""
        self._remember(passes)
        wanting = [i for i, p in enumerate(passes) if p.guess]
        guesses: list[list[int]] = [[] for _ in passes]
        if wanting:
            for i, chain in zip(wanting, self._chains([passes[i] for i in wanting]), strict=True):
                guesses[i] = chain
        return guesses

    def _chains(self, passes: Sequence[RequestPass]) -> list[list[int]]:
        context = torch.stack([p.hidden[len(p.tokens) - 2 - p.start] for p in passes])  # (B, C)
        last = torch.stack([p.tokens[-1] for p in passes]).to(context.device, torch.long)
        memories = [self.requests[p.request].memory for p in passes]
        memory = torch.stack([m for m in memories if m is not None]) if self.drafter.net.memory is not None else None
        search = self.search if self.odds is None else replace(self.search, chain=self._copied(passes, self.odds))
        tree = self.drafter.draft(RecurrentState(self.drafter.net.context(context), memory), last, search)
        tokens, valid = tree.tokens[:, 1:].tolist(), tree.valid[:, 1:].tolist()
        return [[t for t, ok in zip(*row, strict=True) if ok] for row in zip(tokens, valid, strict=True)]

    def _copied(self, passes: Sequence[RequestPass], table: Tensor) -> Chain:
        """What followed each text's end where it occurred before. Odds are those of greedy texts."""
        states = [self.requests[p.request] for p in passes]
        tokens = pad_sequence([p.tokens.long() for p in passes], batch_first=True).to(table.device)
        text = NgramState(tokens, torch.tensor([len(p.tokens) for p in passes], device=table.device))
        hits = torch.stack([self._hits(p, s.copied, table.device) for p, s in zip(passes, states, strict=True)])
        chain, match = find_chain(text)
        for p, state, *row in zip(passes, states, chain, match, hits, strict=True):
            state.copied = Copied(len(p.tokens), *row)
        length = self.search.shape.length
        return Chain(chain, chain_odds(table, torch.zeros(len(passes), device=table.device), match, hits)).upto(length)

    def _hits(self, p: RequestPass, last: Copied | None, device: torch.device) -> Tensor:
        """(2,) with what has been decided since the last chain."""
        if last is None:
            return torch.full((2,), PRIOR, device=device)
        new = p.tokens[last.decided :][None].to(device, torch.long)
        count = torch.tensor([new.shape[1]], device=device)
        accepted = Accepted(torch.zeros_like(new), new, count, 0 * count, 0 * count)
        return updated_hits(last.hits[None], last.chain[None], last.match[None], accepted)[0]

    def _remember(self, passes: Sequence[RequestPass]) -> None:
        """Add the new pairs to the memories: those of all short steps in one call, each prompt piece in its own."""
        new = [(p, state, max(state.remembered, p.start)) for p in passes for state in [self._state(p)]]
        if self.drafter.net.memory is not None:
            few = self.search.shape.length + 1
            steps = [x for x in new if 0 < x[0].paired - x[2] <= few]
            for group in ([steps] if steps else []) + [[x] for x in new if x[0].paired - x[2] > few]:
                self._add(group)
        for p, state, _ in new:
            state.remembered = max(state.remembered, p.paired)

    def _add(self, group: Sequence[tuple[RequestPass, RequestState, int]]) -> None:
        net = self.drafter.net
        assert net.memory is not None
        count = [p.paired - first for p, _, first in group]
        device = group[0][0].hidden.device
        hidden = group[0][0].hidden.new_zeros(len(group), max(count), net.config.context_size)
        tokens = torch.zeros(len(group), max(count), dtype=torch.long)
        for row, ((p, _, first), n) in enumerate(zip(group, count, strict=True)):
            hidden[row, :n] = p.hidden[first - p.start : first - p.start + n]
            tokens[row, :n] = p.tokens[first + 1 : first + 1 + n]
        before = torch.stack([s.memory for _, s, _ in group if s.memory is not None])
        after = self.drafter.remember(before, tokens.to(device), hidden, torch.tensor(count, device=device))
        for (_, state, _), memory in zip(group, after, strict=True):
            state.memory = memory

    def _state(self, p: RequestPass) -> RequestState:
        """The request's state: a new one if the request is new, or if it has lost tokens since."""
        found = self.requests.get(p.request)
        if found is None or found.owner is not p.owner or found.remembered > len(p.tokens) - 1:
            memory = self.drafter.net.memory
            empty = None if memory is None else memory.empty(1)[0]
            found = self.requests[p.request] = RequestState(p.owner, 0, empty)
        return found
