"""A smaller causal LM as drafter: beam search with tree attention over a KV cache of its own.

`Gamma` says how many tokens the draft model guesses in a step. Each row has its own limit, and a step stops drafting
when no row wants more guesses: each guess costs a pass of the draft model. The text does not depend on the limit, since
every guess is verified. The rejection rule requires that a guess, once drawn, is kept whatever its probability. So an
improbable guess ends its row's drafting *after* itself; dropping it would select among the draws, and the text would no
longer have the target's distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.bounds import checked
from redrafter.config import Gamma, Shape
from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache, slot_positions, tree_visibility
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree, within
from redrafter.drafters.checkpoint import identity
from redrafter.errors import DrafterMismatch
from redrafter.targets import Target

GROWTH = 256
"""Cache slots to add when a draft tree needs more than there are."""


@dataclass(frozen=True)
class CausalLMState:
    """The text of each row, and how much of it the draft model has read. `draft` reads the rest."""

    cache: KVCache  # the draft model's; `draft` writes it in place
    cached: Tensor  # (B,) tokens of the text that need not be read again; `draft` updates it in place
    tokens: Tensor  # (B, S) the text, the last token included
    lengths: Tensor  # (B,) tokens of the text
    gamma: Tensor  # (B,) how many tokens to guess next, at most the beam's length


@dataclass(frozen=True)
class CausalLMBeams:
    """The w beams of a search, and the m guesses in the cache so far."""

    base: Tensor  # (B,) slot and position of the first guess
    paths: Tensor  # (B, w, m) bool: the guesses that each beam descends from
    depths: Tensor  # (B, m) from 0
    depth: int  # of the next guess
    logits: Tensor  # (B, w, V') that the next guesses come from


class ModelDrafter:
    """Any causal LM with the target's vocabulary."""

    name = "model"
    layers: tuple[int, ...] = ()
    keeps_cache = True
    gives_probabilities = True

    @checked
    def __init__(
        self,
        model: Target,
        target: Target,
        new_cache: Callable[[int], KVCache] = KVCache,
        gamma: Gamma | None = None,
    ) -> None:
        if model.recurrent:
            raise DrafterMismatch(
                f"the draft model {model.name} keeps a recurrent state, and drafts go back in a text: use a model with "
                "attention only, or another drafter"
            )
        _check_tokenizers(model, target)
        self.model = model
        self.gamma = gamma or Gamma()
        self.default_shape = default_shape(self.gamma)
        self.new_cache = new_cache  # a speech draft model needs a cache with the encoder's output
        # Models of one family pad their embeddings differently: guess only tokens that both models have.
        shared = min(model.vocab_size, target.vocab_size)
        self.shared = None if shared == target.vocab_size else torch.arange(shared, device=target.device)
        self.columns = slice(0, shared)

    @property
    def identity(self) -> str:
        return f"model {identity(self.model)['weights']}"

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> CausalLMState:
        cache = self.new_cache(slots)
        tokens = self._known(tokens)
        self.model.prefill(tokens, lengths.tolist(), cache, ())
        text = tokens.new_zeros(tokens.shape[0], slots)
        text[:, : tokens.shape[1]] = tokens
        first = self.gamma.first if self.gamma.name == "heuristic" else slots
        return CausalLMState(cache, lengths.clone(), text, lengths, torch.full_like(lengths, first))

    def advance(self, state: CausalLMState, accepted: Accepted, hidden: Tensor) -> CausalLMState:
        """Append new tokens to the text; the next draft reads them."""
        place = torch.arange(accepted.tokens.shape[1], device=state.lengths.device)
        slots = state.lengths[:, None] + place
        tokens = self._known(accepted.tokens)
        new = torch.where(place < accepted.count[:, None], tokens, state.tokens.gather(1, slots))
        return replace(
            state,
            tokens=state.tokens.scatter(1, slots, new),
            lengths=state.lengths + accepted.count,
            gamma=self._next_gamma(state.gamma, accepted),
        )

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that only the target has are read as the last one that the draft model has too."""
        return tokens if self.shared is None else tokens.clamp(max=len(self.shared) - 1)

    def _next_gamma(self, gamma: Tensor, accepted: Accepted) -> Tensor:
        guessed = accepted.tokens.shape[1] - 1  # by the row that guessed furthest
        if self.gamma.name != "heuristic" or not guessed:  # after the prompt there are no guesses yet
            return gamma
        own = gamma.clamp(max=guessed)
        new = torch.where(accepted.drafted >= own, own + 2, (own - 1).clamp(min=1))
        return torch.where(accepted.nodes > 0, new, gamma)  # a step without guesses tells nothing about them

    def draft(self, state: CausalLMState, last: Tensor, search: Search) -> Tree:
        cache = state.cache
        # The host waits here: this drafter is never part of a recorded step.
        longest, unread = torch.stack([state.lengths.amax(), (state.lengths - state.cached).amax()]).tolist()
        if longest + search.visited > cache.slots:
            cache.reserve(longest + search.visited + GROWTH)
        cache.extent = min(longest + max(search.visited, unread, 1), cache.slots)
        limit = state.gamma.clamp(max=search.shape.length)  # (B,)

        def advance(
            beams: CausalLMBeams | None, tokens: Tensor, parents: Tensor
        ) -> tuple[Tensor | None, CausalLMBeams]:
            nonlocal limit
            if beams is None:
                return self._read_text(state, max(unread, 1))
            tokens = self._known(tokens)
            guessed = beams.depth + 1
            if self.gamma.name == "confidence":
                unsure = confidence(beams.logits, tokens, parents) < self.gamma.threshold
                limit = torch.where(unsure, limit.clamp(max=guessed), limit)
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
            return logits, CausalLMBeams(beams.base, paths, depths, beams.depth + 1, logits)

        tree = search.tree(advance, None, last, self.shared)
        state.cached.copy_(state.lengths - 1)  # the last token is read again, for its logits
        # A constant gamma is the beam's length, and only a chain of n-grams reaches below it: that costs no pass.
        return tree if self.gamma.name == "constant" else within(tree, limit)

    def _read_text(self, state: CausalLMState, n: int) -> tuple[Tensor, CausalLMBeams]:
        """Read the next n tokens of each text (fewer where it ends); the logits after its end give the first guess."""
        cache, batch = state.cache, len(state.lengths)
        place = torch.arange(n, device=state.lengths.device).expand(batch, n)
        slots = (state.cached[:, None] + place).clamp(max=cache.extent - 1)  # behind a text's end nobody reads
        chain = torch.ones(n, n, dtype=torch.bool, device=place.device).tril().expand(batch, n, n)
        logits, _ = self.model.forward(
            state.tokens.gather(1, slots.clamp(max=state.tokens.shape[1] - 1)),
            slots,
            slots,
            tree_visibility(state.cached, chain, cache.extent),
            slot_positions(state.cached, place, cache.extent),
            cache,
            (),
        )
        end = (state.lengths - state.cached - 1).clamp(min=0)[:, None, None].expand(-1, 1, logits.shape[2])
        none = place[:, :0]
        logits = logits.gather(1, end)[..., self.columns]
        return logits, CausalLMBeams(state.lengths, none[:, None].bool(), none, depth=0, logits=logits)

    def keep(self, state: CausalLMState, rows: Tensor) -> CausalLMState:
        return keep_rows(state, rows)


def default_shape(gamma: Gamma) -> Shape:
    """A small tree; with an adaptive gamma, a long chain that the draft model may end early."""
    return Shape(width=2, length=4, nodes=7) if gamma.name == "constant" else Shape(width=1, length=10)


def confidence(logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """(B, w, V') logits and the guesses (B, w') drawn from them at beams `parents` -> (B,) the largest probability.

    >>> logits = torch.tensor([[[0.7, 0.2, 0.1]]]).log()
    >>> round(float(confidence(logits, torch.tensor([[1]]), torch.tensor([[0]]))), 3)
    0.2
    """
    row = torch.arange(len(tokens), device=tokens.device)[:, None]
    logp = logits[row, parents, tokens] - logits.float().logsumexp(-1).gather(1, parents)
    return logp.exp().amax(-1)


def _check_tokenizers(model: Target, target: Target) -> None:
    """Raise unless the same tokens have the same ids. With equal tokenizers, vocabulary sizes may differ."""
    if model.tokenizer is not None and model.tokenizer is target.tokenizer:
        return  # the comparison below would read tens of thousands of tokens
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
