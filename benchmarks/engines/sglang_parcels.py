"""SGLang 0.5.16 for the GPU machine.

Left out: of the kernels (365 MB), the builds for other GPUs and all of FlashAttention 3 (`flash_ops`, 1.1 GB unpacked)
but bf16 with the head sizes of the default model and of the widened ones; FlashInfer, xgrammar and IPython, which
SGLang imports for names that are not used here.
"""

from pathlib import Path

from benchmarks.engines.parcels import Cut, Parcels

STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": "def HTML(*a, **k):\n    return a[0] if a else None\n\n\ndef display(*a, **k):\n    pass\n",
    "flashinfer/__init__.py": '__version__ = "0.0.0+stub"\n',
    "flashinfer/prefill.py": "cudnn_batch_prefill_with_kv_cache = None\n",
    "flashinfer/sampling.py": "min_p_sampling_from_probs = top_k_top_p_sampling_from_probs = None\n",
    "xgrammar/__init__.py": "from pydantic import BaseModel\n\n\nclass StructuralTag(BaseModel):\n    pass\n",
    # The package is not installed there; its entry point must be found.
    "redrafter-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: redrafter\nVersion: 0\n",
    "redrafter-0.dist-info/entry_points.txt": "[sglang.srt.plugins]\nredrafter = redrafter.interop.sglang:register\n",
}

FLASH = "flash_prepare_scheduler|flash_fwd_combine|flash_fwd_hdim(64|128)_bf16_((paged_)?(split_)?|packgqa_)sm90"

SGLANG = Parcels(
    requirements=Path(__file__).with_name("sglang.txt"),
    cuts=(
        Cut(
            "sglang-kernel==0.4.5",
            ((r"(sm100|infllm_ops).*[.]so$", ""), ("flash_ops", "flash.zip"), ("", "kernels.zip")),
            stripped="flash_ops",
            sources=FLASH,
        ),
    ),
    stubs=STUBS,
    compiled="sglang/srt",
    variables={
        "TVM_FFI_CACHE_DIR": "{folder}/jit",
        "SGLANG_CACHE_DIR": "{folder}/cache",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_HOST_IP": "127.0.0.1",
        "HOST_IP": "127.0.0.1",
    },
)
