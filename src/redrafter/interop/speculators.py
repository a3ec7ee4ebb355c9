"""A folder in the conventions of vLLM's `speculators` library: read and write.

Its configuration says what is drafted for which model and how; the drafter itself, of which those conventions know no
kind like ours, is described beside that in our own words. `speculators_model_type` names the kind, so software that
does not know it says so instead of loading something else.
"""

import dataclasses
from pathlib import Path
from typing import Any

from redrafter.bounds import shown
from redrafter.drafters import RecurrentConfig, RecurrentNet, checkpoint, files
from redrafter.errors import ConfigError, CorruptCheckpoint

MODEL_TYPE = "redrafter"
VERSION = "0.9.0"
"""Release of `speculators` whose conventions these are."""


def conventions(kind: str, depth: int, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """What every configuration of `speculators` says: what is drafted for which model and how."""
    return {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }


def write(
    folder: Path,
    net: RecurrentNet,
    made_for: dict[str, str],
    verifier: str,
    architectures: list[str],
    depth: int,
    overwrite: bool = False,
) -> None:
    """`verifier`: the target's id or folder; `depth`: how many tokens to guess ahead."""
    if depth < 1:
        raise ConfigError(f"a drafter guesses at least 1 token ahead, got {depth}")
    described: dict[str, Any] = {
        "architectures": ["RedrafterSpeculator"],
        **conventions(MODEL_TYPE, depth, verifier, architectures),
        "transformer_layer_config": {},  # it has none; readers want the key
        "eagle_aux_hidden_state_layer_ids": [layer for layer in net.config.layers if layer != -1],
        "target": made_for,
        "drafter": dataclasses.asdict(net.config),
    }
    files.write_files(folder, described, net.state_dict(), overwrite)


def read(folder: Path) -> tuple[RecurrentNet, dict[str, str]]:
    """The network and the identity of the target it was made for."""
    config = files.read_config(folder)
    kind = config.get("speculators_model_type")
    if kind != MODEL_TYPE:
        raise CorruptCheckpoint(
            f"{folder} holds no recurrent drafter: speculators_model_type is {shown(kind)}, expected {MODEL_TYPE!r}"
        )
    net = checkpoint.build(config, RecurrentConfig, folder)
    assert isinstance(net, RecurrentNet)
    return net, files.read_target(config, folder)
