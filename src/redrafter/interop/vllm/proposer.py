"""The recurrent drafter inside vLLM, as the proposer of its `custom_class` method.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "redrafter.interop.vllm.Proposer",
                                            "num_speculative_tokens": 3}'
    further, if need be: --additional-config '{"redrafter": {"drafter": FOLDER, "width": 1, "least": 0.0}}'

vLLM schedules, verifies and writes; what is here only guesses. It hands a proposer the tokens but neither hidden states
nor the requests' names, so this one looks at the runner that made it: the runner's own method that asks for guesses is
given both, and is watched, on that one object. Hidden states of earlier layers come as vLLM's models give them to any
drafter that asks (the interface they call EAGLE-3). Which versions have all this is checked; others are refused.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from redrafter.config import Shape
from redrafter.drafters.recurrent.chain import ChainDrafter, RequestPass
from redrafter.errors import ConfigError
from redrafter.interop.plugged import said
from redrafter.interop.vllm.measured_depths import MeasuredDepths
from redrafter.interop.vllm.recorded_chains import RecordedChains
from redrafter.interop.vllm.target import (
    HiddenLayers,
    ProposerConfig,
    VllmTarget,
    check_version,
    drafter_for,
    recorded_batches,
)
from redrafter.interop.vllm.timing import Timing

log = logging.getLogger(__name__)


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
        with said():
            check_version()
            self.config = ProposerConfig.of(vllm_config.additional_config)
            if self.config.runner == 2:
                raise ConfigError(
                    'vLLM uses its first runner; "runner": 2 needs vLLM 0.26.0, a GPU, VLLM_USE_V2_MODEL_RUNNER not 0, '
                    "and redrafter installed by pip, which tells vLLM of the entry point; else leave it out"
                )
        self.vllm_config = vllm_config
        self._pass: Pass | None = None

    def load_model(self, target_model: nn.Module) -> None:
        """Called once the target's weights are there."""
        config, scheduler = self.config, self.vllm_config.scheduler_config
        with said():
            self.runner = _runner_of(self)
            target = VllmTarget(target_model, self.vllm_config)
            drafter = drafter_for(config.folder, target)
            self.layers = HiddenLayers(drafter.layers, target.layer_count)
            self.layers.ask(self.runner, target_model, self.vllm_config)
            depth = self.vllm_config.speculative_config.num_speculative_tokens
            shape, slots = Shape(width=config.width, length=depth), scheduler.max_num_seqs
            self.chains = ChainDrafter(drafter, shape, config.least, config.ngrams, slots)
            if config.graphs and target.device.type == "cuda":
                self.chains.follow = RecordedChains(self.chains, recorded_batches(slots))
        if target.device.type == "cuda":
            log.warning("redrafter: drafts in vLLM's first runner; the second is faster (docs/vllm.md says when)")
        # This runner records one number of tokens per request, so a step has all guesses or none.
        self.depths = MeasuredDepths(depth) if config.adaptive else None
        self.timing = Timing(config.timing, target.device)
        if config.timing:
            self.chains.follow = self.timing.watched(self.chains.follow)
        self.longest = self.vllm_config.model_config.max_model_len
        # No guess of ours has a position: a request near its longest stops guessing, not the whole batch with it.
        self.runner.effective_drafter_max_model_len = self.longest + depth
        self._watch()

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
        with self.timing.step(len(sampled_token_ids)):
            decided = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
            return self._propose(self._pass, sampled_token_ids, decided, token_ids_cpu)

    def _propose(
        self, seen: Pass, sampled: list[list[int]], decided: list[int], token_ids: np.ndarray
    ) -> list[list[int]]:
        batch, requests = self.runner.input_batch, self.runner.requests
        self.chains.keep(requests)
        names = batch.req_ids
        counts = [seen.scheduled[name] for name in names]
        starts = batch.num_computed_tokens_cpu[: len(names)].tolist()
        hidden = self.layers.joined(seen.hidden, seen.earlier, sum(counts))
        passes = [
            RequestPass(name, requests[name], token_ids[row, :length], start, count, guess=len(new) > 0)
            for row, (name, new, length, start, count) in enumerate(
                zip(names, sampled, decided, starts, counts, strict=True)
            )
        ]
        guesses = self.chains.step(passes, hidden, self._drafts(counts, sampled))
        room = [max(0, min(seen.depth, self.longest - length)) for length in decided]
        return [chain[:most] for chain, most in zip(guesses, room, strict=True)]

    def _drafts(self, counts: list[int], sampled: list[list[int]]) -> bool:
        """Whether the next step verifies guesses, after one that computed `counts` tokens of each request."""
        if self.depths is None:
            return True
        self.depths.scheduled(counts)
        for count, new in zip(counts, sampled, strict=True):
            if new and count == self.depths.widths[0]:
                self.depths.accepted(count - 1, len(new) - 1)
        return self.depths[len(counts)] > 0


def _runner_of(proposer: Proposer) -> Any:
    """The runner that is loading this proposer: it calls us, and keeps us as its `drafter`."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        caller = frame.f_locals.get("self")
        if getattr(caller, "drafter", None) is proposer and hasattr(caller, "propose_draft_token_ids"):
            return caller
    raise ConfigError("no runner of vLLM's is loading this proposer; use it through --speculative-config only")
