"""The recurrent drafter under an external scheduler: one state per request, one chain of guesses per step.

An engine with its own scheduler computes prompts in pieces, preempts and resumes requests, skips what its prefix cache
holds, and moves rows about. Here it reports which positions a pass computed for which request. Pairs of the memory are
counted by position: none is added twice, and a pair that was never computed here only makes guesses worse.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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
from redrafter.drafters.with_ngrams import DEEPEST, PRIOR, chain_odds, find_chain, odds_table, updated_hits
from redrafter.errors import ConfigError

WINDOW = 1024
"""Tokens at the end of a text in which n-grams look for a match."""


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
    """What n-grams guessed last for a request. On the CPU."""

    decided: int  # tokens that were decided then
    chain: Tensor  # (D,)
    match: Tensor  # () length of the match; 0: none
    hits: Tensor  # (2,) as in `WithNgramsState`


@dataclass
class RequestState:
    """What is kept of a request between passes."""

    owner: object
    remembered: int  # the memory holds the pairs before this position, except those never computed here
    memory: Tensor | None  # (heads, size, size)
    copied: Copied


@dataclass(frozen=True)
class ChainInputs:
    """What drafting a chain for each of B requests starts from, on the drafter's device.

    P is the number of places for new pairs of the memory, S that for a text.
    """

    hidden: Tensor  # (B, P + 1, C) the states of the new pairs, and in the last place the one that chose the last token
    memory: Tensor | None  # (B, heads, size, size)
    hits: Tensor  # (B, 2) as in `WithNgramsState`
    numbers: Tensor  # (B, 3 + P + S) integers: the last token, count of new pairs, length of the text, pairs, text


@dataclass(frozen=True)
class ChainOutputs:
    """Chains, and what is kept for the next step."""

    memory: Tensor | None  # (B, heads, size, size)
    numbers: Tensor  # (B, L + 1 + D) integers: the guesses (-1: none), length of the n-gram match, its chain


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
        self.drafter, self.device = drafter, drafter.vocabulary.device
        self.odds = odds_table().to(self.device) if ngrams else None
        if ngrams:
            drafter.read_every_token()
        scores = torch.promote_types(drafter.vocabulary.dtype, torch.float32)
        self.search = ChainSearch(shape, min_probability, drafter.net.config.vocab_size, scores)
        self.pairs = shape.length + 1  # a step adds at most so many to the memory
        self.pads = False  # whether every step has room for so many, as a recording needs
        self.requests: dict[str, RequestState] = {}
        self.follow: Callable[[ChainInputs], ChainOutputs] = self.compute
        """May be replaced by a recording of `compute`."""

    def keep(self, alive: Iterable[str]) -> None:
        """Forget all requests but these."""
        for request in self.requests.keys() - set(alive):
            del self.requests[request]

    @torch.no_grad()
    def step(self, passes: Sequence[RequestPass]) -> list[list[int]]:
        """One list of guesses for each request; empty where none is wanted."""
        states = [self._state(p) for p in passes]
        for p, state in zip(passes, states, strict=True):
            if not p.guess or p.paired - max(state.remembered, p.start) > self.pairs:
                self._read(p, state)
        wanting = [i for i, p in enumerate(passes) if p.guess]
        guesses: list[list[int]] = [[] for _ in passes]
        if wanting:
            chains = self._chains([passes[i] for i in wanting], [states[i] for i in wanting])
            for i, chain in zip(wanting, chains, strict=True):
                guesses[i] = chain
        return guesses

    def _read(self, p: RequestPass, state: RequestState) -> None:
        """Add the pairs of a prompt's piece to the memory."""
        first = max(state.remembered, p.start)
        count = p.paired - first
        if count > 0 and state.memory is not None:
            hidden = p.hidden[first - p.start : p.paired - p.start]
            tokens = p.tokens[first + 1 : p.paired + 1].to(hidden.device, torch.long)
            pairs = (tokens[None], hidden[None], torch.tensor([count], device=hidden.device))
            state.memory = self.drafter.remember(state.memory[None], *pairs)[0]
        state.remembered = max(state.remembered, p.paired)

    def _chains(self, passes: Sequence[RequestPass], states: Sequence[RequestState]) -> list[list[int]]:
        hits = self._hits(passes, states)
        outputs = self.follow(self._inputs(passes, states, hits))
        if outputs.memory is not None:
            for state, memory in zip(states, outputs.memory, strict=True):
                state.memory = memory
        length = self.search.shape.length
        found = outputs.numbers.cpu()
        guesses, match, chain = found[:, :length], found[:, length], found[:, length + 1 :]
        for p, state, *copied in zip(passes, states, chain, match, hits, strict=True):
            state.remembered = p.paired
            state.copied = Copied(len(p.tokens), *copied)
        return [[token for token in row if token >= 0] for row in guesses.tolist()]

    def _hits(self, passes: Sequence[RequestPass], states: Sequence[RequestState]) -> Tensor:
        """(B, 2) with what has been decided since the last chains."""
        last = [state.copied for state in states]
        new = [p.tokens[copied.decided :].long() for p, copied in zip(passes, last, strict=True)]
        count = torch.tensor([len(tokens) for tokens in new])
        tokens = pad_sequence(new, batch_first=True)
        accepted = Accepted(torch.zeros_like(tokens), tokens, count, 0 * count, 0 * count)
        before = (torch.stack([c.hits for c in last]), torch.stack([c.chain for c in last]))
        return updated_hits(*before, torch.stack([c.match for c in last]), accepted)

    def _inputs(self, passes: Sequence[RequestPass], states: Sequence[RequestState], hits: Tensor) -> ChainInputs:
        """Few copies to the device, whatever the number of requests."""
        numbers, places, hidden = list[list[int]](), list[list[int]](), list[Tensor]()
        counts = [max(0, p.paired - max(s.remembered, p.start)) for p, s in zip(passes, states, strict=True)]
        room, at = self.pairs if self.pads else max(counts), 0
        for p, count in zip(passes, counts, strict=True):
            end, used = p.paired - p.start, max(count, 1)  # without a new pair, the last state alone
            pad = [0] * (room - count)
            numbers.append([int(p.tokens[-1]), count, min(len(p.tokens), WINDOW)])
            numbers[-1] += [*p.tokens[p.paired + 1 - count : p.paired + 1].tolist(), *pad]
            places.append([*range(at, at + count), *pad, at + used - 1])
            hidden.append(p.hidden[end - used : end])
            at += used
        given = torch.tensor(numbers)
        if self.odds is not None:
            texts = [p.tokens[-WINDOW:].long() for p in passes]
            given = torch.cat([given, pad_sequence(texts, batch_first=True)], dim=1)
        memories = [state.memory for state in states if state.memory is not None]
        return ChainInputs(
            torch.cat(hidden)[self._put(torch.tensor(places))],
            torch.stack(memories) if memories else None,
            self._put(hits),
            self._put(given),
        )

    def compute(self, given: ChainInputs) -> ChainOutputs:
        """Remember the new pairs and draft. No value is needed on the host, so that a GPU can record it."""
        last, count, length = (given.numbers[:, i].contiguous() for i in range(3))
        text = 3 + given.hidden.shape[1] - 1  # where it begins
        memory = given.memory
        if memory is not None:
            memory = self.drafter.remember(memory, given.numbers[:, 3:text].contiguous(), given.hidden[:, :-1], count)
        search, copied = self.search, [length[:, None] * 0]
        if self.odds is not None:
            chain, match = find_chain(NgramState(given.numbers[:, text:].contiguous(), length))
            odds = chain_odds(self.odds, torch.zeros_like(given.hits[:, 0]), match, given.hits)
            search = replace(search, chain=Chain(chain, odds).upto(search.shape.length))
            copied = [match[:, None], chain]
        context = self.drafter.net.context(given.hidden[:, -1])
        tree = self.drafter.draft(RecurrentState(context, memory), last, search)
        guesses = torch.where(tree.valid[:, 1:], tree.tokens[:, 1:], -1)
        return ChainOutputs(memory, torch.cat([guesses, *copied], dim=1))

    def blank_inputs(self, batch: int) -> ChainInputs:
        """Inputs of this many requests with empty texts and memories, large enough for any step."""
        memory, config = self.drafter.net.memory, self.drafter.net.config
        numbers = torch.zeros(batch, 3 + self.pairs + (0 if self.odds is None else WINDOW), dtype=torch.long)
        return ChainInputs(
            torch.zeros(batch, self.pairs + 1, config.context_size, dtype=self.drafter.target.dtype).to(self.device),
            None if memory is None else memory.empty(batch).clone(),
            torch.full((batch, 2), PRIOR).to(self.device),
            numbers.to(self.device),
        )

    def _put(self, values: Tensor) -> Tensor:
        """On the device, without waiting for the device."""
        return (values.pin_memory() if self.device.type == "cuda" else values).to(self.device, non_blocking=True)

    def _state(self, p: RequestPass) -> RequestState:
        """The request's state: a new one if the request is new, or if it has lost tokens since."""
        found = self.requests.get(p.request)
        if found is None or found.owner is not p.owner or found.remembered > len(p.tokens) - 1:
            memory = self.drafter.net.memory
            empty = None if memory is None else memory.empty(1)[0]
            depth = 0 if self.odds is None else DEEPEST
            none = Copied(len(p.tokens), torch.zeros(depth, dtype=torch.long), torch.tensor(0), torch.full((2,), PRIOR))
            found = self.requests[p.request] = RequestState(p.owner, 0, empty, none)
        return found
