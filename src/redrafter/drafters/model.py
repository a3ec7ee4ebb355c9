"""A detached smaller causal LM as drafter, with beam search and dynamic tree attention.

How far it guesses may change from step to step (`Gamma`). Every row has its own limit, and a step ends drafting once no
row wants more: the draft model's passes are what a guess costs. Under any rule the text stays what it is: a guess is
either verified or not there. For `rejection` it also matters that a guess, once drawn, is kept whatever it is. So an
improbable one ends its row's drafting *after* itself; to drop it would be to choose among draws, and the text would no
longer have the target's distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.config import Gamma, Shape
from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache, slot_positions, tree_visibility
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree, within
from redrafter.errors import DrafterMismatch
from redrafter.targets import Target

GROWTH = 256
"""Cache slots made at once when they run out."""


@dataclass(frozen=True)
class Read:
    """The draft model's own cache, and the decided tokens it reads at its next guess."""

    cache: KVCache
    lengths: Tensor  # (B,) tokens in its cache
    waiting: Tensor  # (B, n) tokens behind them, padded right; the last real one is the last token
    count: Tensor  # (B,) how many of them are real
    bound: int  # no row has more decided tokens than this
    most: int  # nor ever will have more than this
    gamma: Tensor  # (B,) how many tokens to guess next; the beam's length permitting


@dataclass(frozen=True)
class _Beams:
    """Guesses in the cache so far, m of them, and which of them each of the w beams descends from."""

    base: Tensor  # (B,) slot and position of the first guess
    paths: Tensor  # (B, w, m) bool
    depths: Tensor  # (B, m) from 0
    depth: int  # of the next guess
    logits: Tensor  # (B, w, V') that the next guesses come from


class ModelDrafter:
    """Any causal LM with the target's vocabulary."""

    name = "model"
    layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: Target,
        target: Target,
        new_cache: Callable[[int], KVCache] = KVCache,
        gamma: Gamma | None = None,
    ) -> None:
        _check_tokenizers(model, target)
        self.model = model
        self.gamma = gamma or Gamma()
        self.default_shape = default_shape(self.gamma)
        self.new_cache = new_cache  # a draft model of a speech target needs one that has heard the same
        # Models of one family pad their embeddings differently: guess among the tokens both have.
        shared = min(model.vocab_size, target.vocab_size)
        self.shared = None if shared == target.vocab_size else torch.arange(shared, device=target.device)
        self.columns = slice(0, shared)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Read:
        width = tokens.shape[1]
        cache = self.new_cache(width)
        self.model.prefill(tokens, lengths.tolist(), cache, ())
        none = torch.zeros_like(lengths)
        first = none + (self.gamma.first if self.gamma.name == "heuristic" else slots)
        return Read(cache, lengths, waiting=tokens[:, :0], count=none, bound=width, most=slots, gamma=first)

    def advance(self, state: Read, accepted: Accepted, hidden: Tensor) -> Read:
        # The guess in between has read what was waiting.
        lengths = state.lengths + state.count
        bound = min(state.bound + accepted.tokens.shape[1], state.most)
        gamma = self._next_gamma(state.gamma, accepted)
        return replace(state, lengths=lengths, waiting=accepted.tokens, count=accepted.count, bound=bound, gamma=gamma)

    def _next_gamma(self, gamma: Tensor, accepted: Accepted) -> Tensor:
        guessed = accepted.tokens.shape[1] - 1  # by the row that guessed furthest
        if self.gamma.name != "heuristic" or not guessed:  # none with the prompt
            return gamma
        own = gamma.clamp(max=guessed)
        return torch.where(accepted.drafted >= own, own + 2, (own - 1).clamp(min=1))

    def draft(self, state: Read, last: Tensor, search: Search) -> Tree:
        cache = state.cache
        in_use = state.bound + max(search.visited, state.waiting.shape[1])
        if in_use > cache.slots:
            cache.reserve(in_use + GROWTH)
        cache.extent = in_use
        limit = state.gamma.clamp(max=search.shape.length)  # (B,)

        def advance(beams: _Beams | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor | None, _Beams]:
            nonlocal limit
            if beams is None:
                return self._catch_up(state)
            guessed = beams.depth + 1
            if self.gamma.name == "confidence":
                unsure = confidence(beams.logits, tokens, parents) < self.gamma.threshold
                limit = torch.where(unsure, limit.clamp(max=guessed), limit)
            # The host may be waited for: a model with a cache of its own is never part of a recorded step.
            if self.gamma.name != "constant" and not bool((limit > guessed).any()):
                return None, beams
            batch, width = tokens.shape
            own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
            above = beams.paths.gather(1, parents[..., None].expand(-1, -1, beams.paths.shape[2]))
            depths = torch.cat([beams.depths, torch.full_like(tokens, beams.depth)], dim=1)
            node = beams.depths.shape[1] + torch.arange(width, device=tokens.device)
            paths = torch.cat([above, own], dim=2)
            logits, _ = self.model.forward(
                tokens,
                beams.base[:, None] + depths[:, -width:],
                beams.base[:, None] + node,
                tree_visibility(beams.base, paths, cache.extent),
                slot_positions(beams.base, depths, cache.extent),
                cache,
                (),
            )
            logits = logits[..., self.columns]
            return logits, _Beams(beams.base, paths, depths, beams.depth + 1, logits)

        return within(search.tree(advance, None, last, self.shared), limit)

    def _catch_up(self, state: Read) -> tuple[Tensor, _Beams]:
        """Read what was waiting; the logits after its end are those of the first guess."""
        batch, n = state.waiting.shape
        chain = torch.ones(n, n, dtype=torch.bool, device=state.waiting.device).tril().expand(batch, n, n)
        place = torch.arange(n, device=state.waiting.device).expand(batch, n)
        slots = state.lengths[:, None] + place
        logits, _ = self.model.forward(
            state.waiting,
            slots,
            slots,
            tree_visibility(state.lengths, chain, state.cache.extent),
            slot_positions(state.lengths, place, state.cache.extent),
            state.cache,
            (),
        )
        end = (state.count - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[2])
        none = state.waiting[:, :0]
        logits = logits.gather(1, end)[..., self.columns]
        return logits, _Beams(state.lengths + state.count, none[:, None].bool(), none, depth=0, logits=logits)

    def keep(self, state: Read, rows: Tensor) -> Read:
        state.cache.keep(rows)
        return keep_rows(state, rows)


def default_shape(gamma: Gamma) -> Shape:
    """A small tree; or a chain with room, where it is the draft model that says how far."""
    return Shape(width=2, length=4, nodes=7) if gamma.name == "constant" else Shape(width=1, length=10)


def confidence(logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """(B, w, V') logits and the guesses (B, w') drawn from them at beams `parents` -> (B,) the likeliest's probability.

    >>> logits = torch.tensor([[[0.7, 0.2, 0.1]]]).log()
    >>> round(float(confidence(logits, torch.tensor([[1]]), torch.tensor([[0]]))), 3)
    0.2
    """
    row = torch.arange(len(tokens), device=tokens.device)[:, None]
    logp = logits[row, parents, tokens] - logits.float().logsumexp(-1).gather(1, parents)
    return logp.exp().amax(-1)


def _check_tokenizers(model: Target, target: Target) -> None:
    """The same tokens must have the same ids; sizes alone may differ only where tokenizers say that they do."""
    if model.tokenizer is not None and model.tokenizer is target.tokenizer:
        return  # spares reading tens of thousands of tokens twice
    if model.tokenizer is not None and target.tokenizer is not None:
        theirs, ours = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        if theirs != ours:
            raise DrafterMismatch(
                f"the draft model {model.name} has another tokenizer ({len(theirs)} tokens) than the target "
                f"{target.name} ({len(ours)} tokens)"
            )
    elif model.vocab_size != target.vocab_size:
        raise DrafterMismatch(
            f"the draft model {model.name} has a vocabulary of {model.vocab_size}, "
            f"but the target {target.name} has {target.vocab_size}"
        )
