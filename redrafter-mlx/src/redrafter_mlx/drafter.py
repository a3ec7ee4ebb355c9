"""What guesses: a recurrent network bound to a target, with n-grams mixed in or without; n-grams alone; nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from redrafter_mlx import checkpoint
from redrafter_mlx.beam import Search, beam_search
from redrafter_mlx.config import Shape, require
from redrafter_mlx.errors import ModelNotFound
from redrafter_mlx.network import RecurrentNet
from redrafter_mlx.ngram import Ngrams, chain_of, find_chain
from redrafter_mlx.tree import Tree, candidate_nodes, last_tokens, pack, padded, root_tree

TOKENS = 16384  # tokens that a drafter guesses among: the first ones, which are the most frequent
Product = Callable[[mx.array], mx.array]


class NoDrafter:
    """Plain decoding: guesses nothing. Its methods are those that every drafter has.

    Texts and accepted tokens come as lists, because the host knows them.
    """

    name = "none"
    layers: tuple[int, ...] = ()  # the target's hidden states that the drafter reads
    default_shape = Shape(width=1, length=1)

    def begin(self, prompts: Sequence[list[int]], hidden: mx.array | None) -> Any:
        """Read prompts and the hidden states (B, n, C) above all their tokens but the last, if any -> a state."""

    def draft(self, state: Any, texts: Sequence[list[int]], search: Search) -> Tree:
        """Guess what follows each text, as a packed tree below its last token."""
        return root_tree(texts)

    def advance(self, state: Any, tokens: Sequence[list[int]], hidden: mx.array) -> Any:
        """Take in each row's new tokens; `hidden[b, j]` (B, n, C) chose row b's token j."""

    def keep(self, state: Any, rows: list[int]) -> Any:
        """Drop all rows but these."""


class NgramDrafter(NoDrafter):
    """Prompt lookup: guesses that the last few tokens continue as they did earlier in the same text."""

    name = "ngram"
    default_shape = Shape(width=1, length=7)
    longest, shortest = 4, 2

    def draft(self, state: None, texts: Sequence[list[int]], search: Search) -> Tree:
        length = search.shape.length
        found = [find_chain(text, length, self.longest, self.shortest) for text in texts]
        if not any(match for _, match in found):
            return root_tree(texts)
        scores = mx.array([[[0.0 if match else -mx.inf] * length] for _, match in found])
        nodes, _ = candidate_nodes(mx.array([[chain] for chain, _ in found]), scores)
        return pack(nodes, last_tokens(texts), search.shape.budget)[0]


@dataclass(frozen=True)
class RecurrentState:
    """What the drafter keeps of the text."""

    context: mx.array | None  # (B, C) the hidden state that chose the last token; None before the first token
    memory: mx.array | None  # (B, heads, size, size)
    ngrams: list[Ngrams]  # empty without n-grams


class RecurrentDrafter(NoDrafter):
    """A `RecurrentNet` bound to a target, with the text's n-grams mixed into its beam unless `ngrams` is false."""

    default_shape = Shape(width=2, length=3, nodes=4)

    def __init__(self, net: RecurrentNet, embed: Product, output: Product, ngrams: bool = True) -> None:
        """`embed`: token ids -> the target's embeddings; `output`: multiply by its output embedding (V', E)."""
        self.net, self.embed, self.output, self.ngrams = net, embed, output, ngrams
        self.name = "recurrent+ngram" if ngrams else "recurrent"
        self.layers = net.config.layers

    def begin(self, prompts: Sequence[list[int]], hidden: mx.array | None) -> RecurrentState:
        memory = self.net.empty_memory(len(prompts))
        if hidden is not None:
            memory = self._remember(memory, [prompt[1:] for prompt in prompts], hidden)
        return RecurrentState(None, memory, [Ngrams(list(p)) for p in prompts] if self.ngrams else [])

    def _remember(self, memory: mx.array | None, tokens: Sequence[list[int]], hidden: mx.array) -> mx.array | None:
        """The memory with each row's tokens and the hidden states that chose them."""
        if memory is None:
            return None
        count, ids = mx.array([len(row) for row in tokens]), padded(tokens)
        return self.net.remember(memory, hidden[:, : ids.shape[1]], self.embed(ids), count)

    def draft(self, state: RecurrentState, texts: Sequence[list[int]], search: Search) -> Tree:
        assert state.context is not None, "the first step drafts nothing"
        net, shape, context = self.net, search.shape, state.context[:, None]

        def advance(states: mx.array | None, tokens: mx.array, parents: mx.array) -> tuple[mx.array, mx.array]:
            token = net.unit(self.embed(tokens))
            if states is None:
                states = net.first_state(token, context)
            else:
                states = net.next_state(mx.take_along_axis(states, parents[..., None], axis=1), token)
            found = net.head(net.trunk(states, context, state.memory))
            return (self.output(found) if net.config.head == "tied" else found), states

        chain = chain_of(state.ngrams, search.temperature > 0, max(shape.length, shape.budget))
        last = last_tokens(texts)
        return pack(beam_search(advance, last, search, net.token_ids, chain), last, shape.budget)[0]

    def advance(self, state: RecurrentState, tokens: Sequence[list[int]], hidden: mx.array) -> RecurrentState:
        last = mx.array([len(new) - 1 for new in tokens])
        chose_last = mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        for row, new in zip(state.ngrams, tokens, strict=False):
            row.advance(new)
        memory = self._remember(state.memory, tokens, hidden)
        return RecurrentState(self.net.context(chose_last), memory, state.ngrams)

    def keep(self, state: RecurrentState, rows: list[int]) -> RecurrentState:
        at = mx.array(rows)
        context, memory = (None if x is None else x[at] for x in (state.context, state.memory))
        return RecurrentState(context, memory, [state.ngrams[row] for row in rows] if state.ngrams else [])


def make_drafter(name: str, target: Any) -> NoDrafter:
    """The drafter that a name stands for.

    `auto`: the shipped drafter for this model with n-grams mixed in, else n-grams alone. `recurrent`: the shipped
    drafter alone. `ngram`, `none`, or a folder; `+ngram` behind a name mixes n-grams in.
    """
    bare, mixed, _ = name.partition("+ngram")
    if bare in ("none", "ngram"):
        require(not mixed, f"n-grams mix into a drafter with a network, not into {bare!r}")
        return NoDrafter() if bare == "none" else NgramDrafter()
    own = target.identity()
    if bare in ("auto", "recurrent"):
        folder = checkpoint.find_shipped(own, target.quantised)
        if folder is None and bare == "auto":
            return NgramDrafter()
        if folder is None:
            raise ModelNotFound(
                f"no drafter for {target.name} comes with redrafter-mlx: name a drafter folder, or ngram"
            )
    else:
        folder = Path(bare)
    net, made_for = checkpoint.read(folder)
    checkpoint.compare(made_for, own, f"the drafter {folder.name}", target.name)
    target.check_sizes(net.config)
    net.guess_first(TOKENS)
    net.cast(target.dtype)
    ngrams = bare == "auto" or bool(mixed)
    return RecurrentDrafter(net, target.embed, target.output_rows(net.token_ids), ngrams)
