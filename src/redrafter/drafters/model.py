"""A detached smaller causal LM as drafter, with beam search and dynamic tree attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.batch import keep_rows
from redrafter.core.cache import KVCache, slot_positions, tree_visibility
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
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


@dataclass(frozen=True)
class _Beams:
    """Guesses in the cache so far, m of them, and which of them each of the w beams descends from."""

    base: Tensor  # (B,) slot and position of the first guess
    paths: Tensor  # (B, w, m) bool
    depths: Tensor  # (B, m) from 0
    depth: int  # of the next guess


class ModelDrafter:
    """Any causal LM with the target's vocabulary."""

    name = "model"
    layers: tuple[int, ...] = ()
    default_shape = Shape(width=2, length=4, nodes=7)

    def __init__(self, model: Target, target: Target, new_cache: Callable[[int], KVCache] = KVCache) -> None:
        _check_tokenizers(model, target)
        self.model = model
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
        return Read(cache, lengths, waiting=tokens[:, :0], count=none, bound=width, most=slots)

    def advance(self, state: Read, accepted: Accepted, hidden: Tensor) -> Read:
        # The guess in between has read what was waiting.
        lengths = state.lengths + state.count
        bound = min(state.bound + accepted.tokens.shape[1], state.most)
        return replace(state, lengths=lengths, waiting=accepted.tokens, count=accepted.count, bound=bound)

    def draft(self, state: Read, last: Tensor, search: Search) -> Tree:
        cache = state.cache
        in_use = state.bound + max(search.visited, state.waiting.shape[1])
        if in_use > cache.slots:
            cache.reserve(in_use + GROWTH)
        cache.extent = in_use

        def advance(beams: _Beams | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, _Beams]:
            if beams is None:
                return self._catch_up(state)
            batch, width = tokens.shape
            own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
            above = beams.paths.gather(1, parents[..., None].expand(-1, -1, beams.paths.shape[2]))
            depths = torch.cat([beams.depths, torch.full_like(tokens, beams.depth)], dim=1)
            node = beams.depths.shape[1] + torch.arange(width, device=tokens.device)
            beams = _Beams(beams.base, torch.cat([above, own], dim=2), depths, beams.depth + 1)
            logits, _ = self.model.forward(
                tokens,
                beams.base[:, None] + depths[:, -width:],
                beams.base[:, None] + node,
                tree_visibility(beams.base, beams.paths, cache.extent),
                slot_positions(beams.base, beams.depths, cache.extent),
                cache,
                (),
            )
            return logits[..., self.columns], beams

        return search.tree(advance, None, last, self.shared)

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
        beams = _Beams(state.lengths + state.count, none[:, None].bool(), none, depth=0)
        return logits.gather(1, end)[..., self.columns], beams

    def keep(self, state: Read, rows: Tensor) -> Read:
        state.cache.keep(rows)
        return keep_rows(state, rows)


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
