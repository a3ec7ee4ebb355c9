"""The entry point `sglang.srt.plugins`: tells SGLang of the algorithm REDRAFTER and of the sampling rule `seeded`."""

from typing import Any

from redrafter.interop.plugged import said
from redrafter.interop.sglang.checks import NAME, check
from redrafter.interop.sglang.settings import Settings

SAMPLER = "redrafter"
"""Name of the sampling backend that chooses by the rule `seeded` without speculation."""


def register() -> None:
    """Called by SGLang in every process. What is wrong is said when REDRAFTER is asked for, not here."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(NAME) is not None:
        return

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """Opens the branches of SGLang's n-gram algorithm: trees of any form, and no KV cache of a drafter."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            from sglang.srt.arg_groups.speculative_hook import _handle_ngram

            with said():
                check(server_args)
                server_args.speculative_num_draft_tokens = Settings.of().nodes(server_args.speculative_num_draft_tokens)
            _handle_ngram(server_args)

        def create_future_map(self, device: Any, pool: Any, needs_cpu_seq_lens: bool = True, **more: Any) -> Any:
            from sglang.srt.managers.overlap_utils import FutureMap

            from redrafter.interop.sglang import worker

            # SGLang asks for lengths on the host because its own n-gram worker needs them; ours does not.
            wait = needs_cpu_seq_lens and worker.needs_host_lengths()
            return FutureMap(device, self, pool, wait, **more)

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)  # type: ignore[untyped-decorator]
    def factory(_: Any) -> type:
        from redrafter.interop.sglang.worker import make_worker

        return make_worker()

    from sglang.srt.layers.sampler import register_sampler_backend

    def sampler() -> Any:
        from redrafter.interop.sglang.sampler import fill_seeds, make_sampler

        fill_seeds()
        return make_sampler()()

    register_sampler_backend(SAMPLER, sampler)
