"""SGLang's model as a drafter wants to know it, and the drafter for it."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from redrafter.drafters import RecurrentDrafter
from redrafter.errors import UnsupportedTarget
from redrafter.interop.embeddings import split_embeddings
from redrafter.interop.plugged import recurrent_drafter, refuse_recurrent
from redrafter.interop.sglang.settings import VARIABLE


class SglangTarget:
    """Split embeddings are put together, on every rank."""

    def __init__(self, runner: Any, tokenizer: Any, name: str) -> None:
        refuse_recurrent(runner.model_config.hf_text_config, "SGLang")
        from sglang.srt.distributed import get_tp_group
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        config = runner.model_config
        text = config.hf_text_config
        group = get_tp_group()
        self.name, self.tokenizer = name, tokenizer
        self.layer_count: int = text.num_hidden_layers
        self.hidden_size: int = text.hidden_size
        embedding, head = split_embeddings(
            runner.model,
            name,
            VocabParallelEmbedding,
            ParallelLMHead,
            (lambda rows: group.all_gather(rows, dim=0)) if group.world_size > 1 else None,
        )
        self.vocab_size, width = head.shape
        self.input_embedding = nn.Embedding(self.vocab_size, width, _weight=embedding)
        self.output_embedding = nn.Embedding(self.vocab_size, width, _weight=head)
        self.dtype, self.device = embedding.dtype, embedding.device


def drafter_for(name: str, target: SglangTarget) -> RecurrentDrafter:
    return recurrent_drafter(name, target, "SGLang", f'{VARIABLE}=\'{{"drafter": "FOLDER"}}\'')


class HiddenStates:
    """The hidden states that a drafter reads, of the layers that it names, in its order.

    SGLang's models give hidden states of earlier layers to its own EAGLE-3 drafters, as inputs of layers and without
    the one after the final norm. They are asked for in the same way; the last one is added where the model returns.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], count: int, name: str) -> None:
        named = [layer + count + 1 if layer < 0 else layer for layer in layers]
        earlier = sorted({layer for layer in named if layer < count})
        self.order = [earlier.index(x) if x < count else len(earlier) for x in named]
        if not earlier:
            return
        ask = getattr(model, "set_eagle3_layers_to_capture", None)
        if ask is None or earlier[0] == 0:
            raise UnsupportedTarget(
                f"the drafter reads layers {list(layers)}, but SGLang's {type(model).__name__} for {name} does not "
                "give all of them; train one with --layers -1"
            )
        ask([layer - 1 for layer in earlier])  # SGLang numbers layers by their outputs
        if count in named:
            _add_last(model.model)  # type: ignore[arg-type]

    def __call__(self, hidden: Tensor) -> Tensor:
        """(tokens, all that SGLang returns) -> (tokens, C)."""
        if self.order == list(range(len(self.order))):
            return hidden
        parts = hidden.chunk(max(self.order) + 1, dim=-1)
        return torch.cat([parts[i] for i in self.order], dim=-1)


def _add_last(model: nn.Module) -> None:
    """Have the model return its last hidden states among those of earlier layers."""
    forward = model.forward

    @functools.wraps(forward)
    def with_last(*args: Any, **kwargs: Any) -> Any:
        hidden, earlier = forward(*args, **kwargs)
        return hidden, [*earlier, hidden]

    model.forward = with_last
