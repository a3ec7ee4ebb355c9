"""What `load` would run with these options: drafter, shape, runtime, kernels, and how exact the text is.

The default model is described without reading its weights, if they decide nothing. Any other model is loaded first,
because its drafter and its profile are found by its weights, and its exactness by trying.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.cache_folder import cache_folder
from redrafter.config import RuleConfig, Shape
from redrafter.core.step import Drafter
from redrafter.drafters import NgramDrafter, NoDrafter, WithNgrams, checkpoint, files, shipped
from redrafter.drafters.int8 import usable_for
from redrafter.drafters.load import bind
from redrafter.drafters.recurrent import RecurrentDrafter
from redrafter.drafters.recurrent.compiled import compiles
from redrafter.drafters.traits import about, drafts
from redrafter.engine.exactness import Exactness, Promise, make_promise, unrecorded
from redrafter.engine.resolve import resolve_drafter
from redrafter.interop.find import WITH_NGRAMS
from redrafter.kernels import runs_triton
from redrafter.kernels.cpu import library
from redrafter.planning.costs import costs_on
from redrafter.targets import Target, load_target
from redrafter.targets.cpu import packed_load
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.targets.default import FOLDER, NAME
from redrafter.targets.load import parse_device, parse_dtype
from redrafter.targets.quantised.nearest import SCHEMES
from redrafter.tuning.store import resolve_runtime, saved_profiles, use_profile


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What runs for one prompt."""

    model: str
    drafter: str
    about: str | None
    """What the files of a published drafter describe."""
    shape: Shape | None
    """None is plain decoding."""
    tuned: bool
    """Whether `redrafter tune` has measured what its steps cost, and the prices can be used."""
    runtime: str
    device: torch.device
    dtype: torch.dtype
    precision: torch.dtype
    """How far the logits of two passes may differ: the dtype's rounding, unless layers round what they receive."""

    kernels: str
    """The faster path that is used in place of the model's own forward passes, if any."""

    promise: Promise | None
    """None: the first use of the model tries and decides."""

    @property
    def exactness(self) -> Exactness | None:
        return None if self.promise is None else self.promise.exactness

    @property
    def exactness_text(self) -> str:
        if self.promise is None:
            return "bitwise or ties: the first use of the model tries and decides"
        return self.promise.sentence(self.precision)


def describe(
    model: str | None = None,
    drafter: str = "auto",
    *,
    dtype: str | None = None,
    device: str | None = None,
    runtime: str = "auto",
) -> RunDescription:
    """For the seeded rule and no explicit shape, like `load` with these arguments."""
    where = torch.device(parse_device(device))
    packed = where.type == "cpu" and dtype in (None, "auto", *packed_load.BITS) and library.can_run()
    kind = parse_dtype(dtype, where.type)
    default = model is None and dtype not in SCHEMES and not _default_needs_weights(where, runtime, packed)
    found = _default_drafter(drafter, where, kind, packed) if default else None
    if found is not None:
        return _description(NAME, found, found.default_shape, False, runtime, where, kind, None, packed)
    target = load_target(model, dtype=dtype, device=device)
    found = resolve_drafter(drafter, target)
    tuned = drafts(found) and use_profile(costs_on(target.device.type), target, found, runtime)
    return _description(target.name, found, found.default_shape, tuned, runtime, target.device, target.dtype, target)


def _default_needs_weights(device: torch.device, runtime: str, packed: bool = False) -> bool:
    """Only the weights tell whether a profile fits the default model, and how exact its recorded passes are.

    A model that was never converted is not converted to describe it.
    """
    if not packed and not (cache_folder() / FOLDER).exists():
        return False
    return _records(device, runtime) or any(p.target_name == NAME for p in saved_profiles())


def _records(device: torch.device, runtime: str) -> bool:
    """As `Engine.recorded`."""
    return device.type == "cuda" and resolve_runtime(device.type, runtime) != "eager"


def _default_drafter(drafter: str, device: torch.device, dtype: torch.dtype, packed: bool) -> Drafter | None:
    """The default model's drafter, bound to a stand-in for the model; None for a name that needs the model."""
    if drafter == "none":
        return NoDrafter()
    if drafter == "ngram":
        return NgramDrafter()
    folder = shipped_for(NAME)
    if folder is None or drafter not in ("auto", "recurrent", "recurrent" + WITH_NGRAMS):
        return None
    net, _ = checkpoint.read(folder)
    alone = bind(net, _Unloaded(net.config.vocab_size, net.config.embedding_size, device, dtype))
    if isinstance(alone, RecurrentDrafter):
        alone.would_compile = packed and usable_for(alone.vocabulary) and compiles(alone.net)
    return alone if drafter == "recurrent" else WithNgrams(alone)


def shipped_for(name: str) -> Path | None:
    """The folder of the shipped drafter that names this model as its target."""
    for config in sorted(shipped.FOLDER.glob(f"*/{files.CONFIG_FILE}")):
        if files.read_config(config.parent)["target"]["name"] == name:
            return config.parent
    return None


class _Unloaded:
    """A target of the right sizes whose embeddings are all zeros and take no memory."""

    name, tokenizer, layer_count = NAME, None, 10**6

    def __init__(self, vocab_size: int, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.vocab_size, self.hidden_size, self.device, self.dtype = vocab_size, hidden_size, device, dtype
        self.output_embedding = self.input_embedding = _Zeros(vocab_size, hidden_size, device, dtype)


class _Zeros(torch.nn.Module):
    def __init__(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.zeros(1, 1, device=device, dtype=dtype).expand(rows, columns)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


def _description(
    model: str,
    drafter: Drafter,
    shape: Shape,
    tuned: bool,
    runtime: str,
    device: torch.device,
    dtype: torch.dtype,
    target: Target | None,
    packed: bool = False,
) -> RunDescription:
    plain = not drafts(drafter)
    packed = packed or isinstance(target, PackedTarget)
    recorded, compiles = _records(device, runtime), runtime in ("auto", "compiled")
    promise = None
    if target is not None:
        promise = make_promise(target, drafter, RuleConfig(), recorded=recorded, compiles=compiles)
    elif packed:
        promise = Promise("bitwise")
    elif not recorded:
        promise = Promise("ties", unrecorded(device))
    runtime = resolve_runtime(device.type, runtime)
    if packed:
        kernels = f"quantised weights, one C++ call a pass ({library.chosen()})"
    else:
        kernels = _gpu_kernels(device, runtime) if device.type == "cuda" else _cpu_kernels(dtype, target)
    return RunDescription(
        model=model,
        drafter=_drafter_name(drafter),
        about=about(drafter),
        shape=None if plain else shape,
        tuned=tuned,
        runtime=runtime,
        device=device,
        dtype=dtype,
        precision=dtype if target is None else target.precision,
        kernels=kernels,
        promise=promise,
    )


def _drafter_name(drafter: Any) -> str:
    return str(getattr(drafter, "name", type(drafter).__name__))


def _gpu_kernels(device: torch.device, runtime: str) -> str:
    if runtime == "eager":
        return "none: the eager runtime uses the model's own layers"
    if not runs_triton(device):
        return "none: Triton is not installed, so the model's own layers run"
    return "Triton kernels and fused layers, for the layers where they match the model's own (checked at first use)"


def _cpu_kernels(dtype: torch.dtype, target: Target | None) -> str:
    if dtype != torch.float32:
        return "none: the C++ kernels need float32"
    if target is None:
        return f"C++ kernels for few-token passes: {library.status()}"
    replaced = sum("forward" in vars(module) for module in target.model.modules())
    if replaced:
        return f"C++ kernels in {replaced} modules of the model"
    return f"none: the model's own layers run; C++ kernels: {library.status()}"
