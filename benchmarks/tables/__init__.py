"""Which block of which page shows which results files: {block: (files, the function that writes the block)}."""

from collections.abc import Callable
from functools import partial

from benchmarks.tables import (
    architectures,
    decoding,
    drafters,
    engines,
    front,
    quantised,
    redrafter_paper,
    sampling,
    sampling_paper,
)

Block = tuple[tuple[str, ...], Callable[..., str]]

EXPECT = ("cpu.json", "gpu_7b.json", "gpu_13b.json", "gpu_33b.json", "sglang_gpu.json", "vllm_gpu.json")
TRAINING = ("training_h200.json", "peers.json")

# Blocks without the command, machine and commit under them: they link to the results page or to the results files.
MAPS: dict[str, Block] = {
    "registered": ((), drafters.registered),
    "expect": (EXPECT, partial(front.expect, "docs/benchmarks.md")),
    "expect_here": (EXPECT, partial(front.expect, "")),
    "training": (TRAINING, front.training),
    "map_redrafter": (
        (
            "table1_gpu.json",
            "table1_cpu.json",
            "gpu_13b.json",
            "gpu_33b.json",
            "serve_gpu.json",
            "vllm_cpu.json",
            "cpu.json",
            "gpu_7b_batch.json",
            "packing.json",
            "gpu_7b.json",
            "distillation.json",
        ),
        redrafter_paper.redrafter,
    ),
    "map_first_version": (
        (
            "table1_gpu.json",
            "rnn.json",
            "peers.json",
            "rules.json",
            "gpu_7b_batch.json",
        ),
        redrafter_paper.first_version,
    ),
    "map_speculative_sampling": (
        (
            "summaries.json",
            "speech_sampling.json",
            "summaries_cpu.json",
            "speech_sampling_cpu.json",
            "verify_kernel.json",
        ),
        sampling_paper.speculative_sampling,
    ),
}

BLOCKS: dict[str, Block] = {
    "cpu_demo": (("cpu_demo.json",), decoding.cpu_demo),
    "cpu": (("cpu.json",), decoding.cpu),
    "gpu": (("gpu_7b.json", "gpu_13b.json", "gpu_33b.json"), decoding.gpu),
    "gpu_long": (("gpu_7b.json",), decoding.long_context),
    "batch": (("gpu_7b_batch.json",), decoding.batch),
    "packing": (("packing.json", "gpu_7b.json"), decoding.packing),
    "equality": (("equality_cpu.json",), decoding.equality),
    "exact_gpu": (("exact_gpu.json",), decoding.exact_gpu),
    "serve_equality": (("serve_equality.json",), decoding.serve_equality),
    "past_answers": (("past_answers.json",), decoding.past_answers),
    "structured": (("structured.json",), decoding.structured),
    "serve_cpu": (("serve_cpu.json",), decoding.serving),
    "serve_gpu": (("serve_gpu.json",), decoding.serving),
    "serve_start": (("serve_start.json",), decoding.serve_start),
    "server_attack": (("server_attack.json",), decoding.server_attack),
    "vllm": (("vllm_cpu.json",), engines.vllm),
    "engines": (("engines_gpu.json",), engines.engines),
    "sglang": (("sglang_gpu.json",), engines.engine),
    "vllm_gpu": (("vllm_gpu.json",), engines.engine),
    "mlx": (("mlx_cpu.json",), decoding.mlx),
    "drafter": (("drafter_smollm2.json",), drafters.drafter),
    "ablation": (("drafter_smollm2.json",), drafters.ablations),
    "table1_gpu": (("table1_gpu.json",), drafters.table1),
    "table1_cpu": (("table1_cpu.json",), drafters.table1),
    "ablations_gpu": (("ablations_gpu.json",), drafters.ablations),
    "peers": (("peers.json",), drafters.peers),
    "exports": (("exports.json",), drafters.exports),
    "formats": (("formats.json",), drafters.formats),
    "ngram_odds": (("ngram_odds.json",), drafters.ngram_odds),
    "rules": (("rules.json",), drafters.rules),
    "verify_kernel": (("verify_kernel.json",), sampling.verify_kernel),
    "verify_parity": (("verify_parity.json",), sampling.parity),
    "summaries": (("summaries.json",), sampling.sampling),
    "speech_sampling": (("speech_sampling.json",), sampling.sampling),
    "summaries_cpu": (("summaries_cpu.json",), sampling.sampling),
    "speech_sampling_cpu": (("speech_sampling_cpu.json",), sampling.sampling),
    "architectures": (("architectures.json",), architectures.families),
    "speech": (("speech.json",), sampling.speech),
    "quantize": (("quantize.json",), quantised.quantize),
    **MAPS,
}
