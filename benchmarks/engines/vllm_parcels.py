"""vLLM 0.26.0, the newest release for torch 2.11.0, for the GPU machine.

Left out: FlashAttention 2 (a Hopper GPU uses version 3), the kernels for quantised and sparse models, the web server's
page, `vllm bench`, and the code for other GPUs in `_C` and `_moe_C`. xgrammar is imported for annotations alone.
"""

from pathlib import Path

from benchmarks.engines.parcels import Cut, Parcels

DROPPED = (
    "vllm/vllm-rs|_vllm_fa2_C|third_party/(fmha_sm100|deep_gemm|tml_fa4)/|_qutlass_C|_flashmla_|vllm/benchmarks/"
    "|serve/instrumentator/static/|[.]jpg$"
)
XGRAMMAR = '''
"""Stands for xgrammar, whose names vLLM uses in annotations."""

__version__ = "0.2.1"


class Unused:
    def __init__(self, *args, **kwargs):
        raise RuntimeError("xgrammar is not installed")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Unused,), {})
'''

VLLM = Parcels(
    requirements=Path(__file__).with_name("vllm.txt"),
    cuts=(
        Cut(
            "vllm==0.26.0",
            ((DROPPED, ""), ("_vllm_fa3_C", "vllm-fa3.zip"), ("/_moe_C", "vllm-moe.zip"), ("", "vllm.zip")),
            stripped="/_(moe_)?C_stable_libtorch",
        ),
    ),
    stubs={
        "xgrammar/__init__.py": XGRAMMAR,
        # The package is not installed there; its entry point must be found.
        "redrafter-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: redrafter\nVersion: 0\n",
        "redrafter-0.dist-info/entry_points.txt": (
            "[vllm.general_plugins]\nredrafter = redrafter.interop.vllm.speculator:register\n"
        ),
    },
    compiled="vllm",
    variables={
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": "{folder}/cache",
        "TRITON_CACHE_DIR": "{folder}/triton",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONFAULTHANDLER": "1",
    },
)
