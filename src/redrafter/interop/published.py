"""Recognises drafter folders of other projects, reads those that we can run, and refuses the others by their name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from redrafter.drafters import files
from redrafter.errors import UnsupportedDrafter
from redrafter.interop import block, eagle3, medusa
from redrafter.interop.readings import Published
from redrafter.targets import TargetInfo

Read = Callable[[Path, Mapping[str, Any], TargetInfo], Published]
READERS: dict[str, Read] = {
    "EAGLE-3": eagle3.read,
    "DFlash": block.read,
    "DSpark": block.read,
    "JetSpec": block.read,
    "Medusa": medusa.read,
}
"""Name of a format -> what reads it."""


def read(folder: Path, target: TargetInfo) -> Published | None:
    """The published drafter in a folder; None: it is none of these."""
    if not (folder / files.CONFIG_FILE).exists():
        _refuse_gguf(folder)
    config = files.read_config(folder)
    name = recognise(config, _tensor_names(folder))
    if name is None:
        return None
    if name not in READERS:
        raise UnsupportedDrafter(
            f"the drafter {folder} is {name}, which redrafter does not run; it runs {', '.join(READERS)}"
        )
    return READERS[name](folder, config, target)


def recognise(config: Mapping[str, Any], tensors: frozenset[str]) -> str | None:
    """The name of a published format, from a configuration and the names of the tensors.

    >>> recognise({"architectures": ["LlamaForCausalLMEagle3"]}, frozenset())
    'EAGLE-3'
    >>> recognise({"architectures": ["LlamaForCausalLM"]}, frozenset())
    """
    names = {name.removeprefix("model.") for name in tensors}
    kind = str(config.get("speculators_model_type", "")).lower()
    architecture = str(config.get("architectures", "")).lower()
    nested = config.get("dflash_config")
    projector = str(nested.get("projector_type", "")).lower() if isinstance(nested, Mapping) else ""
    marks = {  # the more particular first
        "P-EAGLE": kind == "peagle" or "peagle" in architecture or "mask_hidden" in names,
        "DFlash2": "dflash2" in (kind, projector) or "dflash2" in architecture
        or any(name.startswith("candidate_selector.") for name in names),
        "Domino": "domino" in (kind, projector) or "domino" in architecture
        or any(name.startswith("prefix_gru.") for name in names),
        "DSpark": "dspark" in (kind, projector) or "dspark" in architecture
        or any(name.startswith("markov_head.") for name in names),
        "JetSpec": kind == "jetspec" or "jetspec" in architecture,
        "DFlash": kind == "dflash" or "dflash" in architecture or nested is not None,
        "MTP in a folder of its own": kind == "mtp",
        "EAGLE-3": kind == "eagle3" or "eagle3" in architecture
        or ("fc.weight" in names and not names.isdisjoint(_EAGLE_MARKS)),
        "Medusa": "medusa_num_heads" in config or "medusa" in architecture or config.get("model_type") == "medusa"
        or any(name.startswith(("medusa_head.", "medusa_heads.")) for name in names),
        "MLPSpeculator": "mlpspeculator" in architecture or config.get("model_type") == "mlp_speculator",
        "EAGLE (1 or 2)": kind == "eagle" or "eagle" in architecture,
    }  # fmt: skip
    return next((name for name, found in marks.items() if found), None)


_EAGLE_MARKS = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}


def _tensor_names(folder: Path) -> frozenset[str]:
    """The names in the header of the weights' file; none where it cannot be read."""
    try:
        files.check_regular(folder / files.WEIGHTS_FILE)
        with safe_open(folder / files.WEIGHTS_FILE, "pt") as file:
            return frozenset(file.keys())
    except Exception:  # whoever reads the file says what is wrong with it
        return frozenset()


def _refuse_gguf(folder: Path) -> None:
    found = next(iter(sorted(folder.glob("*.gguf"))), None)
    if found is not None:
        raise UnsupportedDrafter(
            f"the drafter {found} is a GGUF file, which redrafter reads for targets only: give the drafter's folder "
            f"with {files.CONFIG_FILE} and {files.WEIGHTS_FILE}"
        )
