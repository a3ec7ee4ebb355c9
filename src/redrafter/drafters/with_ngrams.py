"""Two sources in one tree: a drafter's beam search, with the text's own n-grams mixed in.

Where the end of the text occurred before, the tokens that followed there are a chain of guesses. The beam search mixes
the chain into the drafter's distribution (core/chain.py). Where nothing matches, the tree is the drafter's alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.chain import Chain
from redrafter.core.rows import keep_rows
from redrafter.core.rules import BeamSearch, Search
from redrafter.core.step import Drafter
from redrafter.core.tree import Tree
from redrafter.drafters.ngram import NgramDrafter, NgramState
from redrafter.drafters.none import NoDrafter
from redrafter.drafters.recurrent import RecurrentDrafter
from redrafter.drafters.traits import identity_of, keeps_cache
from redrafter.errors import ConfigError
from redrafter.kernels import ngram_match

SHORTEST, LONGEST = 1, 5
"""Tokens of a match."""
TELLING = 2
"""Tokens of the shortest match that tells whether this text repeats itself. One token often matches by chance."""
DEEPEST = 15
"""Tokens of a chain. The GPU's tree attention adds up the keys of deeper trees in another order than plain decoding."""
ODDS = {
    "greedy": ((0.30, 0.60, 0.73), (0.55, 0.70, 0.81), (0.66, 0.72, 0.82), (0.74, 0.82, 0.84), (0.77, 0.84, 0.91)),
    "sampled": ((0.19, 0.33, 0.60), (0.40, 0.47, 0.66), (0.52, 0.60, 0.66), (0.58, 0.44, 0.63), (0.64, 0.69, 0.79)),
}
"""Probability that a copied token is right if all copied tokens before it were, by match length (1, 2, 3, 4, 5 or
more): for the first token of the chain, for the second and for later ones. Counted by benchmarks/ngram_odds.py in
answers of SmolLM2-135M-Instruct (benchmarks/results/ngram_odds.json)."""
SINGLE = 0.5
"""What the odds of the first token after a match of one token are multiplied by. The drafter is better informed than
such a match: in simulations odds of 0.13 gave no fewer tokens/step than 0.22 (docs/experiments.md)."""
FORGETS = 0.9
"""How much of the count of hits remains after each step whose match is TELLING."""
PRIOR = 2.0
"""Copied tokens, all of them right, that a row's count of hits begins with."""


@dataclass(frozen=True)
class WithNgramsState:
    """The drafter's own state, the text, and the chain for the next step."""

    inner: Any  # a dataclass of tensors
    text: NgramState
    chain: Tensor  # (B, D) the tokens after the longest, most recent match of the text's end
    match: Tensor  # (B,) its length; 0: none
    hits: Tensor  # (B, 2) recent copied tokens that were right, and all recent copied tokens that were decided


class WithNgrams:
    """A drafter that guesses by a network (recurrent, Medusa, EAGLE, a causal LM), with n-grams mixed into its beam.

    The rule `rejection` requires that all guesses are draws from one distribution. With this rule the drafter guesses
    alone.
    """

    copies = True
    longest_chain = DEEPEST

    def __init__(self, inner: Drafter) -> None:
        if isinstance(inner, NoDrafter | NgramDrafter | WithNgrams) or not hasattr(inner, "draft"):
            raise ConfigError(f"n-grams mix into a drafter with a network, not into {type(inner).__name__}")
        if isinstance(inner, RecurrentDrafter):
            inner.read_every_token()
        self.inner = inner
        self.text = NgramDrafter(LONGEST, SHORTEST)
        self.odds = odds_table()

    @property
    def name(self) -> str:
        return f"{getattr(self.inner, 'name', type(self.inner).__name__)}+ngram"

    @property
    def network_drafter(self) -> Drafter:
        return self.inner

    @property
    def keeps_cache(self) -> bool:
        return keeps_cache(self.inner)

    @property
    def identity(self) -> str:
        return f"{identity_of(self.inner)} with n-grams"

    @property
    def layers(self) -> tuple[int, ...]:
        return self.inner.layers

    @property
    def default_shape(self) -> Shape:
        return self.inner.default_shape

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> WithNgramsState:
        self.odds = self.odds.to(tokens.device)  # once: a copy in `draft` would wait for the host
        text = self.text.begin(tokens, lengths, hidden, slots)
        hits = torch.full((len(tokens), 2), PRIOR, device=tokens.device)
        return self._matched(self.inner.begin(tokens, lengths, hidden, slots), text, hits)

    def recall(self, state: WithNgramsState, past: Tensor, sizes: Tensor) -> WithNgramsState:
        """See `NgramDrafter.recall`."""
        return self._matched(state.inner, self.text.recall(state.text, past, sizes), state.hits)

    def advance(self, state: WithNgramsState, accepted: Accepted, hidden: Tensor) -> WithNgramsState:
        hits = updated_hits(state.hits, state.chain, state.match, accepted)
        text = self.text.advance(state.text, accepted, hidden)
        return self._matched(self.inner.advance(state.inner, accepted, hidden), text, hits)

    def _matched(self, inner: Any, text: NgramState, hits: Tensor) -> WithNgramsState:
        return WithNgramsState(inner, text, *find_chain(text), hits)

    def draft(self, state: WithNgramsState, last: Tensor, search: Search) -> Tree:
        if not isinstance(search, BeamSearch):
            return self.inner.draft(state.inner, last, search)
        odds = chain_odds(self.odds, search.sampling.temperature, state.match, state.hits)
        return self.inner.draft(state.inner, last, replace(search, chain=Chain(state.chain, odds)))

    def keep(self, state: WithNgramsState, rows: Tensor) -> WithNgramsState:
        return keep_rows(state, rows)


def odds_table() -> Tensor:
    """(greedy or sampled, match length, depth): `ODDS` for every depth of a chain, with `SINGLE`."""
    table = torch.empty(2, LONGEST - SHORTEST + 1, DEEPEST)
    for part, by_size in zip(table, ODDS.values(), strict=True):
        for row, (first, second, later) in zip(part, by_size, strict=True):
            row[0], row[1], row[2:] = first, second, later
    table[:, 0, 0] *= SINGLE
    return table


def find_chain(text: NgramState) -> tuple[Tensor, Tensor]:
    """The tokens (B, D) after the longest, most recent match of the text's end, and its length (B,); 0: no match."""
    return ngram_match.chain(text.tokens, text.lengths, LONGEST, SHORTEST, DEEPEST)


def chain_odds(table: Tensor, temperature: Tensor, match: Tensor, hits: Tensor) -> Tensor:
    """(B, D): the table's odds, corrected by the row's own recent hits; 0 where nothing matches."""
    odds = table[(temperature > 0).long(), (match - SHORTEST).clamp(min=0)]
    return torch.where((match > 0)[:, None], odds * (hits[:, :1] / hits[:, 1:]), 0.0)


def updated_hits(hits: Tensor, chain: Tensor, match: Tensor, accepted: Accepted) -> Tensor:
    """Count the copied tokens that the new tokens have decided: those that were right, and the first wrong one.

    Chains of matches that are not TELLING do not count.
    """
    width = min(chain.shape[1], accepted.tokens.shape[1])
    new = torch.arange(width, device=chain.device) < accepted.count[:, None]
    right = ((chain[:, :width] == accepted.tokens[:, :width]) & new).long().cumprod(1).sum(1)
    decided = torch.minimum(right + 1, accepted.count.clamp(max=width))
    counts = FORGETS * hits + torch.stack([right, decided], 1)
    return torch.where(((match >= TELLING) & (accepted.count > 0))[:, None], counts, hits)
