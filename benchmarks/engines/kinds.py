"""How each engine is started: plain, and with redrafter's drafter."""

import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engines.client import PlainWriter, ProcessWriter, Writer
from benchmarks.engines.parcels import Parcels
from benchmarks.engines.sglang_parcels import SGLANG
from benchmarks.engines.vllm_parcels import VLLM
from redrafter import Shape

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REQUESTS = 32
"""Most requests at once."""
CONTEXT = 2048
CACHE_TOKENS = 32768
"""Of each engine: the caches of two engines fit beside each other."""
SIZES = [1, 2, 4, 8, 16, 32]
"""Numbers of requests for which an engine records a CUDA graph."""
PROMPTS = [
    1,
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 2049, 256),
]
"""Tokens of recorded prompts in SGLang: one, which else runs eagerly, and SGLang's own sizes up to `CONTEXT`."""
ATTENTION = {"triton": "Triton attention", "fa3": "FlashAttention 3"}
"""SGLang's backends that are sent, by their names in SGLang."""
MIXED = (64, 128, 192, 256, 384, 512)
"""Tokens of recorded steps that also read a prompt."""
_ports = itertools.count(30500, 500)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model and its drafter, to be started as plain and as speculative decoding."""

    model: Path
    drafter: str
    beam: str = "16x5:63"
    """Shape of the largest tree."""
    depth: int = 4
    """Tokens drafted per step where the engine verifies a chain."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the drafter in this engine."""


@dataclass(frozen=True)
class Started:
    """The options of an engine and its further environment variables."""

    options: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An engine that can be measured."""

    label: str
    chosen: Callable[[Mapping[str, Any]], str] = lambda _: ""
    """What settings chose, as the results say it after the label."""
    script: str
    options: Callable[[Pair], tuple[Started | None, Started]]
    """Of plain and of speculative decoding; None: the same engine decodes plainly if a request asks for it."""
    parcels: Parcels | None = None
    fallbacks: tuple[dict[str, Any], ...] = ({},)
    """Settings, tried in this order until the engine starts and writes the right texts."""
    seeded: bool = True
    """Whether a seed gives the same sampled text with and without speculation."""

    def described(self, settings: Mapping[str, Any]) -> str:
        """Name of the engine in the results.

        >>> KINDS["sglang"].described({"backend": "fa3"})
        'SGLang 0.5.16, FlashAttention 3'
        >>> KINDS["vllm"].described({"compile": True})
        'vLLM 0.26.0, FlashAttention 3, torch.compile; plain on runner V2'
        """
        return self.label + self.chosen(settings)

    def start(self, pair: Pair, folder: Path, name: str, patience: float) -> tuple[Writer, Writer]:
        """Start plain and speculative decoding at once, each in a process of its own with a log in `folder`."""
        plain, speculative = self.options(pair)
        drafting = self.process(speculative, folder, f"{name}-redrafter", patience)
        if plain is None:
            return PlainWriter(drafting), drafting
        return self.process(plain, folder, f"{name}-plain", patience), drafting

    def other(self, pair: Pair, folder: Path, name: str, patience: float) -> ProcessWriter:
        """Start one more contender: speculative decoding, or plain with the setting `"drafts": false`."""
        settings = dict(pair.settings)
        drafts = settings.pop("drafts", True)
        plain, speculative = self.options(replace(pair, settings=settings))
        chosen = speculative if drafts else plain
        assert chosen is not None, "only redrafter's own engine decodes plainly if a request asks for it"
        return self.process(chosen, folder, name, patience)

    def process(self, given: Started, folder: Path, name: str, patience: float) -> ProcessWriter:
        if self.parcels is not None:
            environment = self.parcels.environment(folder, REPOSITORY)
        else:
            environment = os.environ | {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "PYTHONUNBUFFERED": "1"}
        log = folder / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        return ProcessWriter(HERE / self.script, given.options, environment | given.variables, log, patience)


def sglang(pair: Pair) -> tuple[Started, Started]:
    """Settings are the plug-in's. Besides, of both: `backend`, their attention; `batches` and `prompts`, the numbers of
    requests and of a prompt's tokens that are recorded as CUDA graphs. With fewer, an engine starts earlier."""
    settings = {"drafter": pair.drafter, "shape": pair.beam} | pair.settings
    both = {
        "model_path": str(pair.model),
        "dtype": "bfloat16",
        "attention_backend": settings.pop("backend", "triton"),
        "sampling_backend": "redrafter",  # draws by seed, so that sampled texts can be compared
        "grammar_backend": "none",
        "mem_fraction_static": 0.8,
        "max_total_tokens": CACHE_TOKENS,
        "context_length": CONTEXT,
        "max_running_requests": REQUESTS,
        "cuda_graph_bs_decode": settings.pop("batches", SIZES),
        "cuda_graph_bs_prefill": settings.pop("prompts", PROMPTS),
        "disable_custom_all_reduce": True,
        "skip_server_warmup": True,
        "random_seed": 0,
        "log_level": "info",
    }
    speculative = {
        "speculative_algorithm": "REDRAFTER",
        "speculative_num_draft_tokens": Shape.of(pair.beam).budget + 1,
        "enable_return_hidden_states": True,
    }
    return (
        Started(both | {"port": next(_ports)}, {"REDRAFTER_SGLANG": "{}"}),
        Started(both | speculative | {"port": next(_ports)}, {"REDRAFTER_SGLANG": json.dumps(settings)}),
    )


def attention(settings: Mapping[str, Any]) -> str:
    backend = settings.get("backend", "triton")
    return f", {ATTENTION.get(backend, backend)}"


def vllm(pair: Pair) -> tuple[Started, Started]:
    """Settings are the plug-in's. With `graphs` false, vLLM records no CUDA graphs of verification either.

    Besides: `depth`; `mixed`, with which steps that also read a prompt are recorded, except for attention, for plain
    decoding too; `compile`, with which both are compiled and recorded as vLLM does it by default.
    """
    both: dict[str, Any] = {
        "model": str(pair.model),
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,  # only compared with the free memory, because the cache's size is given
        "kv_cache_memory_bytes": CACHE_TOKENS * bytes_per_token(pair.model),
        "max_model_len": CONTEXT,
        "max_num_seqs": REQUESTS,
        "seed": 0,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "disable_log_stats": False,  # else nothing counts the steps
    }
    settings = dict(pair.settings)
    depth, mixed = settings.pop("depth", pair.depth), settings.pop("mixed", False)
    compiled = settings.pop("compile", False)
    variables = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"} if mixed else {}
    speculative: dict[str, Any] = {
        "speculative_config": {
            "method": "custom_class",
            "model": "redrafter.interop.vllm.Proposer",
            "num_speculative_tokens": depth,
        }
    }
    width = depth + 1 if settings.get("runner") == 1 else None
    if not settings.get("graphs", True):
        speculative["enforce_eager"] = True
    elif not compiled:
        speculative |= graphs(width, mixed)
    speculative["additional_config"] = {"redrafter": {"drafter": pair.drafter} | settings}
    return Started(both | ({} if compiled else graphs(1, mixed)), variables), Started(both | speculative, variables)


def graphs(width: int | None, mixed: bool) -> dict[str, Any]:
    """vLLM's options for CUDA graphs of whole steps with so many tokens per request, without torch.compile.

    Without a width, the plug-in chooses the numbers of tokens, for steps with and without guesses.

    >>> graphs(5, False)["compilation_config"]["cudagraph_capture_sizes"]
    [5, 10, 20, 40, 80, 160]
    """
    options: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE" if mixed else "FULL_DECODE_ONLY"}
    if width is not None:
        sizes = [width * requests for requests in SIZES]
        options["cudagraph_capture_sizes"] = sizes + [size for size in MIXED if mixed and size > sizes[-1]]
    elif mixed:
        options["max_cudagraph_capture_size"] = MIXED[-1]
    return {"compilation_config": options}


def bytes_per_token(model: Path) -> int:
    """Of the KV cache in bf16."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 2 * config["num_hidden_layers"] * heads * size)


def own(pair: Pair) -> tuple[None, Started]:
    """As `redrafter serve`: shapes are chosen by step times that are measured at the start. Settings: `runtime`."""
    given = {"model": str(pair.model), "drafter": pair.drafter, "device": "cuda", "dtype": "bf16", "shape": None}
    return None, Started(given | {"rows": REQUESTS, "context": CONTEXT // 2, "runtime": "auto"} | pair.settings)


KINDS = {
    "sglang": Kind(
        label="SGLang 0.5.16",
        chosen=attention,
        script="sglang_process.py",
        options=sglang,
        parcels=SGLANG,
        fallbacks=(
            {},
            {"adaptive": False},
            {"adaptive": False, "graphs": False},
            {"adaptive": False, "graphs": False, "host_lengths": True},
        ),
    ),
    "vllm": Kind(
        label="vLLM 0.26.0, FlashAttention 3",
        chosen=lambda settings: f", {'' if settings.get('compile') else 'no '}torch.compile; plain on runner V2",
        script="vllm_process.py",
        options=vllm,
        parcels=VLLM,
        fallbacks=({}, {"runner": 1}, {"runner": 1, "graphs": False}),
        seeded=False,
    ),
    "own": Kind(label="redrafter, scheduler of its server without HTTP", script="own_process.py", options=own),
}
