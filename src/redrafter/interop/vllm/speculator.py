"""The recurrent drafter in vLLM's second runner: drafting stays on the GPU, and steps are scheduled ahead.

`choose` decides whether it is used; the options are those of `proposer.py`. vLLM's second runner has no entry for
drafters of other packages, so `register`, the entry point `vllm.general_plugins`, replaces what chooses the drafter
there. Engines without this drafter stay as they are.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from redrafter.config import Shape
from redrafter.drafters.recurrent.chain_slots import ChainSlots
from redrafter.errors import ConfigError
from redrafter.interop.plugged import said
from redrafter.interop.vllm.capture_sizes import capture_sizes
from redrafter.interop.vllm.device_chains import DeviceChains, Reading, Texts
from redrafter.interop.vllm.measured_depths import MeasuredDepths
from redrafter.interop.vllm.target import (
    SECTION,
    HiddenLayers,
    ProposerConfig,
    VllmTarget,
    drafter_for,
    recorded_batches,
)
from redrafter.interop.vllm.timing import Timing

log = logging.getLogger(__name__)

PROPOSER = "redrafter.interop.vllm.Proposer"
TESTED = ("0.26.0",)
"""Versions whose second runner is known."""
MOST_CAPTURED = 512
"""Tokens of the largest recorded step unless the user gives a bound, as in vLLM."""


def ours(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method == "custom_class" and speculative.model == PROPOSER


def wanted(vllm_config: Any) -> bool:
    """Whether this engine is to draft with our drafter in the second runner. `choose` has decided."""
    additional = vllm_config.additional_config
    section = additional.get(SECTION, {}) if isinstance(additional, dict) else {}
    return ours(vllm_config) and isinstance(section, dict) and section.get("runner") == 2


def choose(vllm_config: Any) -> None:
    """Decide on a runner where the user did not, and write it into the configuration, which every process is given.

    The second: on CUDA, a model on one GPU, guesses of one length, and vLLM itself would use it for plain decoding.
    """
    from vllm.platforms import current_platform

    with said():
        config = ProposerConfig.of(vllm_config.additional_config)
    if config.runner != "auto" or not isinstance(vllm_config.additional_config, dict):
        return
    given, settings = vllm_config.additional_config, vllm_config.additional_config.get(SECTION, {})
    known = current_platform.is_cuda() and vllm_config.parallel_config.world_size_across_dp == 1 and not config.least
    vllm_config.additional_config = {**given, SECTION: {**settings, "runner": 2}}
    if not (known and vllm_config.use_v2_model_runner):
        vllm_config.additional_config = {**given, SECTION: {**settings, "runner": 1}}


def size_captures(vllm_config: Any) -> None:
    """Record steps of both widths, unless the user says which. vLLM's own sizes leave many of them out."""
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    if compilation.cudagraph_capture_sizes is not None:
        return
    requests, width = scheduler.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens + 1
    most, mode = compilation.max_cudagraph_capture_size, compilation.cudagraph_mode
    if most is None:
        # Larger steps read prompts. Where they are not recorded, a larger bound would only give them the settings of
        # recorded attention.
        alone = mode is not None and not mode.mixed_mode()
        most = min(requests * width * (1 if alone else 2), MOST_CAPTURED)
    if sizes := capture_sizes(requests, width, min(most, scheduler.max_num_batched_tokens)):
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, sizes[-1]


def adaptive(vllm_config: Any) -> bool:
    """Whether step times decide. Without scheduling ahead, vLLM ignores how many guesses its scheduler asks for."""
    asked = ProposerConfig.of(vllm_config.additional_config).adaptive
    return asked and bool(vllm_config.scheduler_config.async_scheduling)


def register() -> None:
    """Called by vLLM in every process, before there is a configuration. Other versions are left as they are."""
    import vllm

    if vllm.__version__.split("+")[0] not in TESTED:
        return
    from vllm.config import VllmConfig

    if getattr(VllmConfig, "_redrafter", False):
        return
    VllmConfig._redrafter = True
    unsupported, prepare = VllmConfig._get_v2_model_runner_unsupported_features, VllmConfig.__post_init__
    second = VllmConfig.use_v2_model_runner.fget

    def still_unsupported(self: Any) -> list[str]:
        found: list[str] = unsupported(self)
        return [x for x in found if "custom_class" not in x] if wanted(self) else found

    def use_v2_model_runner(self: Any) -> bool:
        """Asked in each process before it makes a runner, and before its scheduler's first step."""
        used: bool = second(self)
        if used and wanted(self):
            _replace()
        return used

    def post_init(self: Any) -> None:
        if ours(self):
            choose(self)
        if not wanted(self):
            prepare(self)
            return
        size_captures(self)
        # vLLM schedules ahead for methods whose guesses stay on the GPU, which it knows by name.
        config: Any = importlib.import_module("vllm.config.vllm")
        known = config.NgramGPUTypes
        config.NgramGPUTypes = Literal["ngram_gpu", "custom_class"]
        try:
            prepare(self)
        finally:
            config.NgramGPUTypes = known

    VllmConfig._get_v2_model_runner_unsupported_features = still_unsupported
    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)
    VllmConfig.__post_init__ = post_init


@functools.cache
def _replace() -> None:
    _replace_speculator()
    _replace_depths()


def _replace_speculator() -> None:
    import vllm.v1.worker.gpu.model_runner as second  # took `init_speculator` by name

    init, load = second.init_speculator, second.GPUModelRunner.load_model

    def init_speculator(vllm_config: Any, device: Any, *rest: Any) -> Any:
        return make_speculator()(vllm_config, device) if wanted(vllm_config) else init(vllm_config, device, *rest)

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if hasattr(self.speculator, "attach"):
            self.speculator.attach(self)

    second.init_speculator = init_speculator
    second.GPUModelRunner.load_model = load_model


def _replace_depths() -> None:
    """Let measured step times decide how many guesses the scheduler asks for."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, count = Scheduler.schedule, Scheduler.make_spec_decoding_stats

    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_redrafter"):  # the first step; this process may make its scheduler before it asks
            self._redrafter = wanted(self.vllm_config) and adaptive(self.vllm_config)
            if self._redrafter:
                self.dynamic_sd_lookup = MeasuredDepths(self.num_spec_tokens)
        output = schedule(self, *args, **kwargs)
        if isinstance(self.dynamic_sd_lookup, MeasuredDepths):
            self.dynamic_sd_lookup.scheduled(list(output.num_scheduled_tokens.values()))
        return output

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.dynamic_sd_lookup, MeasuredDepths) and kwargs.get("num_draft_tokens"):
            self.dynamic_sd_lookup.accepted(kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"])
        return count(self, *args, **kwargs)

    Scheduler.schedule, Scheduler.make_spec_decoding_stats = scheduled, counted


@functools.cache
def make_speculator() -> type:
    """The class of the drafter. A function, since its base class is vLLM's."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class Speculator(BaseSpeculator):  # type: ignore[misc]
        supports_mm_inputs = False
        draft_logits = None  # guesses without probabilities

        def __init__(self, vllm_config: Any, device: torch.device) -> None:
            with said():
                self.config = ProposerConfig.of(vllm_config.additional_config)
                if vllm_config.parallel_config.world_size_across_dp > 1:
                    raise ConfigError('"runner": 2 is for a model on one GPU; leave it out')
                if self.config.least:
                    raise ConfigError('with "runner": 2 all guesses have one length; leave out "least"')
            self.vllm_config, self.device = vllm_config, device
            self.depth = vllm_config.speculative_config.num_speculative_tokens
            self.model = nn.Identity()  # vLLM looks through its modules
            self.fresh: list[int] = []  # slots of new requests
            self.drafts = True  # whether the next step verifies guesses
            if adaptive(vllm_config):  # vLLM records steps with and without guesses
                most = vllm_config.scheduler_config.max_num_seqs
                both = [(1, most, self.depth), (most + 1, most + 1, 0)]
                vllm_config.speculative_config.num_speculative_tokens_per_batch_size = both

        def attach(self, runner: Any) -> None:
            """Called once the target's weights are there."""
            config = self.config
            with said():
                target = VllmTarget(runner.model, self.vllm_config)
                drafter = drafter_for(config.folder, target)
                self.layers = HiddenLayers(drafter.layers, target.layer_count)
                self.layers.ask(runner, runner.model, self.vllm_config)
                if self.layers.earlier:
                    runner.model.set_aux_hidden_state_layers(tuple(self.layers.earlier))
                shape = Shape(width=config.width, length=self.depth)
                slots = ChainSlots(drafter, shape, runner.max_num_reqs, ngrams=config.ngrams)
            states = runner.req_states
            texts = Texts(states.all_token_ids.gpu, states.total_len.gpu)
            self.chains = DeviceChains(slots, texts, recorded_batches(runner.max_num_reqs))
            self.timing = Timing(config.timing, self.device)
            self.follow: Callable[..., Tensor] = self.chains.step
            if config.timing:
                self.follow = self.timing.watched(self.follow)
            self._watch(runner, states)
            log.warning("redrafter: drafts in vLLM's second runner, %d tokens ahead", self.depth)

        def _watch(self, runner: Any, states: Any) -> None:
            """Note which slots begin anew, and whether the next step has room for guesses."""
            add, execute = states.add_request, runner.execute_model

            def add_request(req_id: str, *args: Any, **kwargs: Any) -> None:
                add(req_id, *args, **kwargs)
                self.fresh.append(states.req_id_to_index[req_id])

            def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                self.drafts = scheduler_output.num_spec_tokens_to_schedule > 0
                return execute(scheduler_output, *args, **kwargs)

            states.add_request, runner.execute_model = add_request, execute_model

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            pass

        def capture(self) -> None:
            if self.config.graphs:
                self.chains.record()

        @torch.inference_mode()
        def propose(
            self,
            input_batch: Any,
            attn_metadata: Any,  # noqa: ARG002 - vLLM's signature
            slot_mappings: Any,  # noqa: ARG002
            last_hidden_states: Tensor,
            aux_hidden_states: list[Tensor] | None,
            num_sampled: Tensor,
            num_rejected: Tensor,  # noqa: ARG002
            *_: Any,
            dummy_run: bool = False,
            **__: Any,
        ) -> Tensor:
            rows = input_batch.num_reqs
            if dummy_run:
                return torch.zeros(rows, self.depth, dtype=torch.long, device=self.device)
            with self.timing.step(rows):
                return self._propose(input_batch, last_hidden_states, aux_hidden_states or [], num_sampled)

        def _propose(self, input_batch: Any, last: Tensor, earlier: list[Tensor], num_sampled: Tensor) -> Tensor:
            rows = input_batch.num_reqs
            fresh, self.fresh = self.fresh, []
            hidden = self.layers.joined(last, earlier, input_batch.num_tokens)
            reading = reading_of(input_batch)
            slots, first = input_batch.idx_mapping[:rows], input_batch.query_start_loc[:rows]
            return self.follow(slots, first, num_sampled[:rows], hidden, fresh, reading, self.drafts)

    return Speculator


def reading_of(batch: Any) -> list[Reading]:
    """The rows of a batch that read a prompt or a piece of it."""
    guessed = batch.num_draft_tokens_per_req
    return [
        Reading(i, int(batch.idx_mapping_np[i]), int(batch.query_start_loc_np[i]), start, count)
        for i, (start, count) in enumerate(
            zip(batch.num_computed_prefill_tokens_np.tolist(), batch.num_scheduled_tokens.tolist(), strict=True)
        )
        if batch.is_prefilling_np[i] and (guessed is None or not guessed[i])
    ]
