"""The rule `seeded` as SGLang's sampler: for the first token of a text, and for plain decoding under the same rule."""

from typing import Any

from torch import Tensor

from redrafter.core.transfer import put
from redrafter.interop.sglang.sampling import choose, sampling_of, seed_of


def make_sampler() -> type:
    """SGLang's `Sampler`, with its random draw replaced. Greedy batches never draw."""
    from sglang.srt.layers.sampler import Sampler

    class SeededSampler(Sampler):  # type: ignore[misc]
        _positions: Tensor | None = None  # of the last tokens, while tokens are chosen
        _chosen: Tensor

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self._positions = kwargs["positions"] if "positions" in kwargs else args[5]
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._positions = None

        def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
            # The last look at raw logits: afterwards SGLang overwrites them by probabilities.
            logits = super()._preprocess_logits(logits, sampling_info)
            if self._positions is not None and not sampling_info.is_all_greedy:  # None: only scores are asked for
                sampling = sampling_of(sampling_info, logits.shape[1])
                self._chosen = choose(logits, sampling, sampling_info.sampling_seed, self._positions.long())
            return logits

        def _sample_from_probs(self, *_: Any) -> Tensor:
            return self._chosen

    return SeededSampler


def fill_seeds() -> None:
    """Have SGLang carry each request's seed with its batches, which it else does only in its deterministic mode."""
    import torch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    def adjusted(self: Any, batch: Any, vocab_size: int) -> None:  # noqa: ARG001 - SGLang's signature
        seeds = [seed_of(r) for r in batch.reqs]
        self.sampling_seed = put(seeds, self.temperatures.device, torch.long)

    SamplingBatchInfo.adjusted_from_schedule_batch = adjusted
