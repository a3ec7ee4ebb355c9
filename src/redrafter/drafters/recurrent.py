"""The papers' drafter: a recurrent network on the target's hidden state."""

import copy
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from redrafter.config import RecurrentConfig, Shape
from redrafter.core.accept import Accepted
from redrafter.core.batch import keep_rows
from redrafter.core.recurrent import RecurrentNet
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters import checkpoint
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.targets import Target


@dataclass(frozen=True)
class Context:
    """All there is to remember: the hidden state that chose the last token."""

    context: Tensor  # (B, C)


class RecurrentDrafter:
    """A `RecurrentNet` bound to a target, whose embeddings it reads."""

    name = "recurrent"
    default_shape = Shape(width=8, length=5, nodes=15)

    def __init__(self, net: RecurrentNet, target: Target) -> None:
        _check_shapes(net.config, target)
        like = next(net.parameters())
        if net.training or like.dtype != target.dtype or like.device != target.device:
            net = copy.deepcopy(net)  # the caller's network, in training perhaps, stays as it is
        self.net = net.to(device=target.device, dtype=target.dtype).eval()
        self.embed = target.input_embedding
        self.tied: Tensor | None = None
        if net.config.head == "tied":
            weight = target.output_embedding.weight.detach()
            self.tied = weight if net.token_ids is None else weight[net.token_ids]

    @property
    def layers(self) -> tuple[int, ...]:
        return self.net.config.layers

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> "RecurrentDrafter":
        net, identity = checkpoint.read(Path(folder))
        checkpoint.compare(identity, target, str(folder))
        return cls(net, target)

    def save(self, folder: str | Path, target: Target, overwrite: bool = False) -> None:
        checkpoint.write(Path(folder), self.net, target, overwrite)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Context:
        return Context(_pick(hidden, lengths - 1))

    def draft(self, state: Context, last: Tensor, search: Search) -> Tree:
        if search.shape.width > self.net.config.guessable:
            raise ConfigError(
                f"beam width {search.shape.width} is larger than the drafter's {self.net.config.guessable} tokens"
            )

        def advance(states: Tensor | None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            embedding = self.embed(tokens)  # (B, w, E)
            context = state.context[:, None].expand(-1, tokens.shape[1], -1)
            if states is None:
                states = self.net.first_state(embedding, context)
            else:
                before = states.gather(1, parents[..., None].expand(-1, -1, states.shape[2]))
                states = self.net.next_state(before, embedding)
            return self.net.logits(states, context, self.tied), states

        return search.tree(advance, None, last, self.net.token_ids)

    def advance(self, state: Context, accepted: Accepted, hidden: Tensor) -> Context:
        return Context(_pick(hidden, (accepted.count - 1).clamp(min=0)))

    def keep(self, state: Context, rows: Tensor) -> Context:
        return keep_rows(state, rows)


def _pick(hidden: Tensor, index: Tensor) -> Tensor:
    """(B, n, C), (B,) -> (B, C)."""
    return hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]


def _check_shapes(config: RecurrentConfig, target: Target) -> None:
    for what, drafter, own in (
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("a context of", config.context_size, target.hidden_size * len(config.layers)),
        ("embeddings of", config.embedding_size, target.input_embedding.weight.shape[1]),
    ):
        if drafter != own:
            raise DrafterMismatch(f"the drafter expects {what} {drafter}, but the target {target.name} has {own}")
