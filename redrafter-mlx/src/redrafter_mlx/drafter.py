"""What guesses: a recurrent network bound to a target, with n-grams mixed in or without; n-grams alone; nothing.

A drafter has `layers`, the target's hidden states that it reads, and `default_shape`. `begin` reads a prompt, `draft`
guesses a tree, `advance` takes in what was accepted, `keep` drops rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from redrafter_mlx.beam import beam_search, visited_nodes
from redrafter_mlx.chain import Chain
from redrafter_mlx.config import Shape
from redrafter_mlx.errors import ConfigError
from redrafter_mlx.network import RecurrentNet
from redrafter_mlx.ngram import Ngrams, chain_of, find_chain
from redrafter_mlx.tree import Nodes, Tree, pack, root_tree


@dataclass(frozen=True)
class Search:
    """How to guess in one step: what the target's rule of choice gives the drafter."""

    shape: Shape
    temperature: float
    noise: mx.array | None  # (B, L+1, V) of the positions after the last token; None at temperature 0


class Drafter(Protocol):
    """What drafts. Prompts and accepted tokens come as lists, because the host knows them."""

    name: str
    layers: tuple[int, ...]
    default_shape: Shape

    def begin(self, prompts: Sequence[list[int]], hidden: Sequence[mx.array]) -> Any:
        """Prompts of P tokens each, and the hidden states (P - 1, C) above all tokens but the last."""

    def draft(self, state: Any, last: mx.array, search: Search) -> Tree:
        """Guess what follows `last` (B,), as a packed tree."""

    def advance(self, state: Any, tokens: Sequence[list[int]], hidden: mx.array) -> Any:
        """Take in each row's new tokens; `hidden[b, j]` (B, n, C) chose row b's token j."""

    def keep(self, state: Any, rows: list[int]) -> Any:
        """Drop all rows but these."""


class NoDrafter:
    """Plain decoding."""

    name = "none"
    layers: tuple[int, ...] = ()
    default_shape = Shape(width=1, length=1)

    def begin(self, prompts: Sequence[list[int]], hidden: Sequence[mx.array]) -> None:  # noqa: ARG002
        return None

    def draft(self, state: None, last: mx.array, search: Search) -> Tree:  # noqa: ARG002
        return root_tree(last)

    def advance(self, state: None, tokens: Sequence[list[int]], hidden: mx.array) -> None:  # noqa: ARG002
        return None

    def keep(self, state: None, rows: list[int]) -> None:  # noqa: ARG002
        return None


class NgramDrafter:
    """Prompt lookup: guesses that the last few tokens continue as they did earlier in the same text."""

    name = "ngram"
    layers: tuple[int, ...] = ()
    default_shape = Shape(width=1, length=7)
    longest, shortest = 4, 2

    def begin(self, prompts: Sequence[list[int]], hidden: Sequence[mx.array]) -> list[list[int]]:  # noqa: ARG002
        return [list(p) for p in prompts]

    def draft(self, state: list[list[int]], last: mx.array, search: Search) -> Tree:
        found = [find_chain(text, search.shape.length, self.longest, self.shortest) for text in state]
        if not any(match for _, match in found):
            return root_tree(last)
        size = (len(state), search.shape.length)
        score = mx.array([[0.0 if match else -mx.inf] for _, match in found])
        nodes = Nodes(
            tokens=mx.array([chain for chain, _ in found]),
            parents=mx.broadcast_to(mx.arange(size[1]), size),
            depths=mx.broadcast_to(mx.arange(1, size[1] + 1), size),
            scores=mx.broadcast_to(score, size),
            length=size[1],
        )
        return pack(nodes, last, search.shape.budget)[0]

    def advance(self, state: list[list[int]], tokens: Sequence[list[int]], hidden: mx.array) -> list[list[int]]:  # noqa: ARG002
        return [text + new for text, new in zip(state, tokens, strict=True)]

    def keep(self, state: list[list[int]], rows: list[int]) -> list[list[int]]:
        return [state[row] for row in rows]


@dataclass(frozen=True)
class RecurrentState:
    """What the drafter keeps of the text."""

    context: mx.array | None  # (B, C) the hidden state that chose the last token; None before the first token
    memory: mx.array | None  # (B, heads, size, size)
    ngrams: list[Ngrams] | None


class RecurrentDrafter:
    """A `RecurrentNet` bound to a target, with the text's n-grams mixed into its beam unless `ngrams` is false."""

    default_shape = Shape(width=2, length=3, nodes=4)

    def __init__(
        self,
        net: RecurrentNet,
        embed: Callable[[mx.array], mx.array],
        output: Callable[[mx.array], mx.array],
        ngrams: bool = True,
    ) -> None:
        """`embed`: token ids -> the target's embeddings; `output`: multiply by its output embedding (V', E)."""
        self.net, self.embed, self.output, self.ngrams = net, embed, output, ngrams
        self.name = "recurrent+ngram" if ngrams else "recurrent"
        self.layers = net.config.layers

    def begin(self, prompts: Sequence[list[int]], hidden: Sequence[mx.array]) -> RecurrentState:
        memories = []
        for prompt, states in zip(prompts, hidden, strict=True):
            memory = self.net.empty_memory(1)
            if memory is not None and len(prompt) > 1:
                pairs = self.embed(mx.array([prompt[1:]]))
                memory = self.net.remember(memory, states[None], pairs, mx.array([len(prompt) - 1]))
            memories.append(memory)
        together = None if memories[0] is None else mx.concatenate(memories)
        return RecurrentState(None, together, [Ngrams(list(p)) for p in prompts] if self.ngrams else None)

    def draft(self, state: RecurrentState, last: mx.array, search: Search) -> Tree:
        assert state.context is not None, "the first step drafts nothing"
        chain = None if state.ngrams is None else chain_of(state.ngrams, search.temperature > 0)
        return self.tree(state.context, state.memory, last, search, chain)

    def tree(
        self, context: mx.array, memory: mx.array | None, last: mx.array, search: Search, chain: Chain | None
    ) -> Tree:
        net, shape = self.net, search.shape
        if shape.width > (guessable := net.config.draft_vocab_size or net.config.vocab_size):
            raise ConfigError(f"beam width {shape.width} is larger than the drafter's {guessable} tokens")
        context = context[:, None]

        def advance(states: mx.array | None, tokens: mx.array, parents: mx.array) -> tuple[mx.array, mx.array]:
            token = net.unit(self.embed(tokens))
            if states is None:
                states = net.first_state(token, context)
            else:
                states = net.next_state(mx.take_along_axis(states, parents[..., None], axis=1), token)
            reading = None if memory is None else net.read(memory, states)
            return net.logits(net.trunk(states, context, reading), self.output), states

        beam = beam_search(
            advance,
            None,
            last,
            width=shape.width,
            length=shape.length,
            temperature=search.temperature,
            noise=search.noise,
            token_ids=net.token_ids,
            chain=chain,
        )
        return pack(visited_nodes(beam, None if chain is None else chain.upto(shape.budget)), last, shape.budget)[0]

    def advance(self, state: RecurrentState, tokens: Sequence[list[int]], hidden: mx.array) -> RecurrentState:
        count = mx.array([len(new) for new in tokens])
        width = max(len(new) for new in tokens)
        memory = state.memory
        if memory is not None:
            padded = mx.array([new + [0] * (width - len(new)) for new in tokens])
            memory = self.net.remember(memory, hidden[:, :width], self.embed(padded), count)
        chose_last = mx.take_along_axis(hidden, (count - 1)[:, None, None], axis=1)[:, 0]
        for row, new in zip(state.ngrams or (), tokens, strict=False):
            row.advance(new)
        return RecurrentState(self.net.context(chose_last), memory, state.ngrams)

    def keep(self, state: RecurrentState, rows: list[int]) -> RecurrentState:
        at = mx.array(rows)
        return RecurrentState(
            None if state.context is None else state.context[at],
            None if state.memory is None else state.memory[at],
            None if state.ngrams is None else [state.ngrams[row] for row in rows],
        )
