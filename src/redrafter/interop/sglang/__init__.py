r"""The recurrent drafter's trees inside SGLang: `--speculative-algorithm REDRAFTER`.

    pip install sglang==0.5.16; pip install --no-deps .
    python -m sglang.launch_server --model-path MODEL --speculative-algorithm REDRAFTER --enable-return-hidden-states \
        --attention-backend triton
    further, if need be: REDRAFTER_SGLANG='{"drafter": "FOLDER", "rule": "seeded"}' in the environment

SGLang schedules, reads prompts, runs the target and keeps its KV cache. This package drafts trees, hands them to SGLang
as trees of its n-gram algorithm, and chooses the tokens. `trees.py` (the batch) knows nothing of SGLang;
`worker.py` is the adapter, `verify_input.py` hands trees over. `interop/load.py` decides how much to draft, by the step
times of `clock.py`.
"""

from redrafter.interop.sglang.plugin import register

__all__ = ["register"]
