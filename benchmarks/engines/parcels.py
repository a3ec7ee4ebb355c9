"""SGLang 0.5.16 in parcels of at most 40 MB, for a machine without a network: Python 3.12, torch 2.11.0 for CUDA 13.

`build` downloads and strips, where there is a network. `unpack` makes a folder of packages there. What is left out: of
the kernels (365 MB), `flash_ops` and the builds for other GPUs, since the Triton attention backend needs none of them;
FlashInfer, xgrammar and IPython, which SGLang imports for names that are not used here.
"""

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = [
    "annotated_types==0.8.0",
    "apache_tvm_ffi==0.1.11",
    "cffi==2.1.1",
    "compressed_tensors==0.20.0",
    "dill==0.4.1",
    "distro==1.9.0",
    "fastapi==0.128.0",
    "gguf==0.17.1",
    "jiter==0.19.0",
    "jsonschema==4.26.0",
    "jsonschema_specifications==2025.9.1",
    "loguru==0.7.3",
    "msgspec==0.22.0",
    "openai==2.6.1",
    "openai_harmony==0.0.4",
    "orjson==3.13.0",
    "partial_json_parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pycparser==3.12",
    "pydantic==2.12.5",
    "pydantic_core==2.41.5",
    "python_multipart==0.0.33",
    "pyzmq==27.3.0",
    "referencing==0.37.0",
    "rpds_py==2026.9.1",
    "setproctitle==1.3.8",
    "sglang==0.5.16",
    "sniffio==1.3.1",
    "soundfile==0.13.1",
    "starlette==0.50.0",
    "tokenizers==0.22.2",
    "torch_memory_saver==0.0.10",
    "typing_inspection==0.4.5",
    "uvicorn==0.54.0",
    "watchfiles==1.3.0",
    "zstandard==0.25.0",
]
KERNELS, DROPPED = "sglang-kernel==0.4.5", ("flash_ops", "sm100", "infllm_ops")
TRANSFORMERS = "transformers==5.12.1"
"""What SGLang 0.5.16 requires."""
GLIBC = ("2_39", "2_35", "2_34", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
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


def build(folder: Path) -> None:
    """Make folder/p1 (wheels) and folder/p2 (transformers and the stripped kernels)."""
    first, second = folder / "p1", folder / "p2"
    for part in (first, second):
        part.mkdir(parents=True, exist_ok=True)
    _download(first, WHEELS)
    _download(second, [TRANSFORMERS])
    with tempfile.TemporaryDirectory() as scratch:
        _download(Path(scratch), [KERNELS])
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(second / "kernels.zip", "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                if not (name.endswith(".so") and any(d in name for d in DROPPED)):
                    new.writestr(name, old.read(name))


def _download(folder: Path, requirements: list[str]) -> None:
    platforms = [f"manylinux_{g}_x86_64" for g in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    words = ["download", "-q", "--no-deps", "--python-version", "3.12", "--only-binary=:all:", "-d", str(folder)]
    for platform in platforms:
        words += ["--platform", platform]
    subprocess.run([sys.executable, "-m", "pip", *words, *requirements], check=True)


def unpack(folder: Path) -> None:
    """Make folder/site from the parcels in folder/p1 and folder/p2, once."""
    site, done = folder / "site", folder / "site" / ".done"
    if done.exists():
        return
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    archives = sorted([*folder.glob("p[0-9]/*.whl"), *folder.glob("p[0-9]/*.zip")])
    if len(archives) < len(WHEELS) + 2:
        raise SystemExit(f"{folder} has {len(archives)} archives of {len(WHEELS) + 2}; copy p1 and p2 there first")
    for archive in archives:
        zipfile.ZipFile(archive).extractall(site)
    for name, text in STUBS.items():
        path = folder / "stubs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    compileall.compile_dir(site / "sglang" / "srt", quiet=2, workers=0)
    done.touch()


def environment(folder: Path, repository: Path) -> dict[str, str]:
    """The environment variables of an SGLang process."""
    paths = [folder / "site", folder / "stubs", repository / "src"]
    (folder / "lib").mkdir(exist_ok=True)
    compiler = Path(
        shutil.which("nvcc", path=f"/usr/local/cuda/bin:{os.environ['PATH']}") or "/usr/local/cuda/bin/nvcc"
    )
    home = Path(os.environ.get("CUDA_HOME") or compiler.resolve().parents[1])
    if not (home / "lib64" / "libcudart.so").exists():  # SGLang links what it compiles with -lcudart
        found = [p for d in sys.path for p in Path(d).glob("nvidia/*/lib/libcudart.so.1[0-9]")]
        link = folder / "lib" / "libcudart.so"
        if found and not link.exists():
            link.symlink_to(found[0])
    return os.environ | {
        "PYTHONPATH": ":".join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "CUDA_HOME": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "LIBRARY_PATH": f"{folder / 'lib'}:{os.environ.get('LIBRARY_PATH', '')}",
        "TVM_FFI_CACHE_DIR": str(folder / "jit"),
        "SGLANG_CACHE_DIR": str(folder / "cache"),
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_HOST_IP": "127.0.0.1",
        "HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "no_proxy": "127.0.0.1,localhost",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "USE_TF": "0",
        "USE_FLAX": "0",
    }
