"""The drafter's state of all requests on the device, one slot each, and one step of drafting over it.

An external engine reports tokens and hidden states; which request has which slot is the caller's business. A step
needs no value on the host, so a GPU can record it as a CUDA graph.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.chain import Chain
from redrafter.drafters.ngram import NgramState
from redrafter.drafters.recurrent.chain_search import ChainSearch
from redrafter.drafters.recurrent.drafter import RecurrentDrafter, RecurrentState
from redrafter.drafters.with_ngrams import DEEPEST, PRIOR, chain_odds, find_chain, odds_table, updated_hits
from redrafter.errors import ConfigError

WINDOW = 1024
"""Tokens at the end of a text in which n-grams look for a match."""


@dataclass(frozen=True)
class ChainInputs:
    """What drafting a chain for each of B requests starts from. All integers are int64, on the drafter's device."""

    hidden: Tensor  # (B, P, C) the states that chose the last `count` tokens; with count 0, the last state alone
    slots: Tensor  # (B,)
    count: Tensor  # (B,) new pairs for the memory
    new: Tensor  # (B,) tokens decided since the request's last chain, at most `length`
    length: Tensor  # (B,) of the text
    text: Tensor  # (B, S) the end of the text, and anything after it


class ChainSlots:
    """Memories and n-gram counts by slot. The last slot is `spare`, for rows that pad a recorded batch.

    With `ngrams`, the text's own n-grams are mixed in: the chain is the more probable of the drafter's and the copied
    one, or one that leaves the copied text halfway.
    """

    def __init__(
        self, drafter: RecurrentDrafter, shape: Shape, slots: int, min_probability: float = 0.0, ngrams: bool = False
    ) -> None:
        if not 0 <= min_probability < 1:
            raise ConfigError(f"the least probability of a guess must be in [0, 1), got {min_probability}")
        self.drafter, self.device = drafter, drafter.vocabulary.device
        if ngrams:
            drafter.read_every_token()
        scores = torch.promote_types(drafter.vocabulary.dtype, torch.float32)
        self.search = ChainSearch(shape, min_probability, drafter.net.config.vocab_size, scores)
        self.pairs = shape.length + 1  # a step adds at most so many to the memory
        self.window = WINDOW if ngrams else self.pairs
        self.spare = slots
        memory, room = drafter.net.memory, slots + 1
        self.memory = None if memory is None else memory.empty(room)  # (slots + 1, heads, size, size)
        self.odds = odds_table().to(self.device) if ngrams else None
        self.hits = torch.full((room, 2), PRIOR, device=self.device)  # as in `WithNgramsState`, and so the next two
        self.chain = torch.zeros(room, DEEPEST, dtype=torch.long, device=self.device)
        self.match = torch.zeros(room, dtype=torch.long, device=self.device)
        self.place = torch.arange(self.pairs, device=self.device)

    def clear(self, slots: Tensor) -> None:
        """New requests begin in these slots."""
        if self.memory is not None:
            self.memory.index_fill_(0, slots, 0.0)
        self.hits.index_fill_(0, slots, PRIOR)
        self.match.index_fill_(0, slots, 0)

    def read(self, slots: Tensor, tokens: Tensor, hidden: Tensor, count: Tensor) -> None:
        """Add the first `count` (B,) pairs of a prompt: tokens (B, n) and the states (B, n, C) that chose them."""
        if self.memory is not None:
            found = self.drafter.remember(self.memory[slots], tokens, hidden, count)
            self.memory.index_copy_(0, slots, found)

    def remember(self, given: ChainInputs) -> Tensor | None:
        """Add the new pairs to the memories, and return these."""
        if self.memory is None:
            return None
        tokens = self._ending(given, given.count)
        memory = self.drafter.remember(self.memory[given.slots], tokens, given.hidden, given.count)
        self.memory.index_copy_(0, given.slots, memory)
        return memory

    def step(self, given: ChainInputs) -> Tensor:
        """Remember the new pairs and draft: (B, L) guesses; -1: none."""
        memory, search = self.remember(given), self.search
        if self.odds is not None:
            search = replace(search, chain=self._copied(given, self.odds).upto(search.shape.length))
        at = (given.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, given.hidden.shape[2])
        context = self.drafter.net.context(given.hidden.gather(1, at)[:, 0])
        last = given.text.gather(1, (given.length - 1).clamp(min=0)[:, None])[:, 0]
        tree = self.drafter.draft(RecurrentState(context, memory), last, search)
        return torch.where(tree.valid[:, 1:], tree.tokens[:, 1:], -1)

    def _copied(self, given: ChainInputs, odds: Tensor) -> Chain:
        """The n-grams' chain, after counting how many tokens of the last one were right."""
        slots, tokens = given.slots, self._ending(given, given.new)
        accepted = Accepted(tokens, tokens, given.new, given.new, given.new)
        hits = updated_hits(self.hits[slots], self.chain[slots], self.match[slots], accepted)
        chain, match = find_chain(NgramState(given.text, given.length))
        for mine, value in ((self.hits, hits), (self.chain, chain), (self.match, match)):
            mine.index_copy_(0, slots, value)
        return Chain(chain, chain_odds(odds, torch.zeros_like(hits[:, 0]), match, hits))

    def _ending(self, given: ChainInputs, count: Tensor) -> Tensor:
        """(B, P): the last `count` tokens of each text, or the first P of them."""
        at = (given.length - count)[:, None] + self.place
        return given.text.gather(1, at.clamp(min=0, max=given.text.shape[1] - 1))
