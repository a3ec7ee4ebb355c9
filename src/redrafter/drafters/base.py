"""The base classes of a drafter kind: configuration, network, and the drafter that runs the network on a target."""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.bounds import Bounds, Count, Layer, Size, check, check_value
from redrafter.config import Shape, require
from redrafter.core.accept import Accepted
from redrafter.core.rows import keep_rows
from redrafter.core.rules import Search
from redrafter.core.tree import Tree
from redrafter.drafters import int8
from redrafter.errors import DrafterMismatch
from redrafter.targets import Target, TargetInfo
from redrafter.targets.embedding import embedding_rows, embedding_shape

N = TypeVar("N", bound="DrafterNet")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(ABC):
    """Sizes of a drafter's network. A subclass adds its own; `config.json` of a checkpoint holds all of them."""

    kind: ClassVar[str]
    """Name of the kind in the registry; a checkpoint's `model_type` is `redrafter_<kind>`."""
    training_options: ClassVar[tuple[str, ...]]
    """The fields of `DrafterOptions` that `for_target` reads. Training refuses the others for this kind."""

    vocab_size: Count
    """Size of the target's vocabulary."""
    context_size: Size
    """Width of the context h: the target's hidden size times the number of layers read."""
    embedding_size: Size
    """Width of the target's token embeddings."""
    draft_vocab_size: Count | None = None
    """Guess only among this many token ids (all when not given)."""
    layers: Annotated[tuple[Layer, ...], Bounds(least=1)] = (-1,)
    """Hidden states the context is made of, as transformers numbers them (-1: after the final norm)."""

    def __post_init__(self) -> None:
        check(self)
        if self.draft_vocab_size is not None:
            check_value("draft_vocab_size", self.draft_vocab_size, Annotated[int, Bounds(most=self.vocab_size)])

    @property
    def guessable(self) -> int:
        """How many different tokens the drafter can guess."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    @abstractmethod
    def for_target(cls, options: Any, target: Target) -> Self:
        """The sizes for a new network of this target, from what the user set (`options.DrafterOptions`)."""

    def check_training(self, depth: int, rollouts: int) -> None:  # noqa: B027 - most kinds accept any depth and data
        """Raise ConfigError if this network cannot learn this depth, or from rollouts of this length (0: none)."""


class DrafterNet(nn.Module):
    """A drafter's weights and their arithmetic. Drafting and training call the same methods."""

    config: DrafterConfig
    token_ids: Tensor | None
    """(V',) the token ids it guesses among; None: all of them."""
    left_out: Tensor | None = None
    """The token ids that `guess_first` left out. A checkpoint keeps them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        ids = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("token_ids", ids)

    def vocabulary(self, output_embedding: Tensor) -> Tensor:
        """(V', F): features times its transpose are logits. By default the target's own output embedding."""
        return output_embedding

    def training_vocabulary(self, output_embedding: Tensor) -> Tensor:
        """The same for the features of training, in which all that logits are a sum of stands side by side."""
        return self.vocabulary(output_embedding)

    @property
    def tied(self) -> bool:
        """Whether the vocabulary is the target's output embedding."""
        rows = torch.empty(0)
        return self.vocabulary(rows) is rows

    @property
    def extensible(self) -> bool:
        """Whether tokens can be added or left out, since no weights are theirs."""
        return self.tied

    def guess_first(self, most: int) -> None:
        """Guess among the first `most` token ids only, if it can leave some out and its first are the most frequent.

        Ascending ids are in no order of frequency: older versions of the trainer sorted them.
        """
        ids = self.token_ids
        if ids is not None and len(ids) > most and self.extensible and bool((ids.diff() < 0).any()):
            self.token_ids, self.left_out = ids[:most], ids[most:]
            self.config = replace(self.config, draft_vocab_size=most)

    def complete(self) -> tuple[DrafterConfig, dict[str, Tensor]]:
        """The sizes and tensors that a checkpoint holds, with the token ids that `guess_first` left out."""
        config, tensors = self.config, self.state_dict()
        if self.left_out is not None:
            tensors["token_ids"] = torch.cat([tensors["token_ids"], self.left_out.to(tensors["token_ids"].device)])
            config = replace(config, draft_vocab_size=len(tensors["token_ids"]))
        return config, tensors

    def guess_more(self, count: int) -> None:
        """Make room for `count` token ids; the caller names the new ones."""
        require(
            self.extensible,
            "only a drafter without weights of its own for each token (--head tied, no Markov head) can guess more "
            "tokens than it has learned",
        )
        if self.token_ids is not None:
            self.token_ids = F.pad(self.token_ids, (0, count - len(self.token_ids)))
            self.config = replace(self.config, draft_vocab_size=count)


class NetDrafter(ABC, Generic[N]):
    """A network bound to a target. A subclass says what its state is and how it drafts.

    The state is a dataclass of tensors whose first axis is the rows of the batch.
    """

    gives_probabilities = True
    about: str | None = None
    """What a published drafter's files describe, and how it is run."""

    def __init__(self, net: N, target: TargetInfo) -> None:
        self.net = move_to_target(net, target)
        self.embed = target.input_embedding
        self.vocabulary = self.net.vocabulary(output_rows(self.net, target) if self.net.tied else torch.empty(0))
        self.logits: Callable[[Tensor], Tensor] = lambda x: F.linear(x, self.vocabulary)

    @property
    def name(self) -> str:
        return self.net.config.kind

    @property
    def identity(self) -> str:
        """See `traits.identity_of`: the sizes and some of the weights, hashed."""
        digest = hashlib.sha256(repr(self.net.config).encode())
        for weight in self.net.state_dict().values():
            flat = weight.detach().flatten()
            digest.update(flat[:: max(1, len(flat) // 64)].double().cpu().numpy().tobytes())
        return f"{self.name} {digest.hexdigest()[:16]}"

    @property
    def layers(self) -> tuple[int, ...]:
        return self.net.config.layers

    @property
    def default_shape(self) -> Shape:
        """A GPU verifies 64 tokens about as fast as one; a CPU pays for each."""
        on_gpu = self.vocabulary.device.type == "cuda"
        return Shape(width=16, length=self.default_length, nodes=63) if on_gpu else Shape(width=3, length=3, nodes=5)

    @property
    def default_length(self) -> int:
        """Tokens to guess ahead on a GPU."""
        return 6

    def use_int8(self) -> Self:
        """Multiply by int8 weights, on a CPU in fp32; elsewhere nothing changes.

        It replaces methods of the network, so it is only for networks that we loaded ourselves.
        """
        if int8.usable_for(self.vocabulary):
            int8.replace_linears(self.net)
            self.logits = int8.product(self.vocabulary)
        return self

    @abstractmethod
    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        """See `core.step.Drafter`, as for the methods below."""

    @abstractmethod
    def draft(self, state: Any, last: Tensor, search: Search) -> Tree: ...

    @abstractmethod
    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any: ...

    def keep(self, state: Any, rows: Tensor) -> Any:
        return keep_rows(state, rows)


def move_to_target(net: N, target: TargetInfo) -> N:
    """The network on the target's device, in its dtype, in eval mode.

    A network that has to change, or is being trained, is copied first: the caller's stays as it is.
    """
    check_shapes(net.config, target)
    like = next(net.parameters())
    if net.training or like.dtype != target.dtype or like.device != target.device:
        net = copy.deepcopy(net)
    return net.to(device=target.device, dtype=target.dtype).eval()


def output_rows(net: DrafterNet, target: TargetInfo) -> Tensor:
    """(V', H) the rows of the target's output embedding for the tokens that the network guesses among."""
    return embedding_rows(target.output_embedding, net.token_ids).to(target.device)


def select_position(hidden: Tensor, index: Tensor) -> Tensor:
    """Hidden states (B, n, C) at one index (B,) per row -> (B, C)."""
    return hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]


def last_accepted(hidden: Tensor, accepted: Accepted) -> Tensor:
    """(B, C): the hidden state that chose the last accepted token, from (B, L+1, C)."""
    return select_position(hidden, (accepted.count - 1).clamp(min=0))


def target_sizes(options: Any, target: Target, layers: tuple[int, ...]) -> dict[str, Any]:
    """The fields of `DrafterConfig`, for a network that reads these layers of the target."""
    count = target.layer_count
    for layer in layers:
        require(
            -count - 1 <= layer <= count,
            f"layers names hidden state {layer}, but {target.name} has {count} layers (0..{count}, -1 the last)",
        )
    return {
        "vocab_size": target.vocab_size,
        "embedding_size": embedding_shape(target.input_embedding)[1],
        "draft_vocab_size": options.draft_vocab if 0 < options.draft_vocab < target.vocab_size else None,
        "context_size": target.hidden_size * len(layers),
        "layers": layers,
    }


def require_matching_output(kind: str, target: Target) -> None:
    """For kinds that guess hidden states: the target's output embedding must read those."""
    width = embedding_shape(target.output_embedding)[1]
    require(
        width == target.hidden_size,
        f"{kind} needs an output embedding of the hidden states' width, {target.hidden_size}, got {width}",
    )


def check_shapes(config: DrafterConfig, target: TargetInfo) -> None:
    """Raise unless a drafter of these sizes can read this target."""
    count = target.layer_count
    for layer in config.layers:
        if not -count - 1 <= layer <= count:
            raise DrafterMismatch(f"the drafter reads hidden state {layer}, but {target.name} has {count} layers")
    for what, drafter, own in (
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        ("a context of", config.context_size, target.hidden_size * len(config.layers)),
        ("embeddings of", config.embedding_size, embedding_shape(target.input_embedding)[1]),
    ):
        if drafter != own:
            raise DrafterMismatch(f"the drafter expects {what} {drafter}, but the target {target.name} has {own}")
