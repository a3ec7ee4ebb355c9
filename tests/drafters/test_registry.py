"""The registry: every folder is listed, every kind is complete, and reading the options imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

import redrafter.drafters
from redrafter.drafters import registry
from redrafter.drafters.base import DrafterConfig, DrafterNet, NetDrafter

FOLDER = Path(redrafter.drafters.__file__).parent


def test_every_folder_is_one_line():
    folders = {p.parent.name for p in FOLDER.glob("*/network.py")}
    assert folders == {module.partition(":")[0].rpartition(".")[2] for module in registry.MODULES.values()}
    for folder in folders:
        assert {"config.py", "network.py", "drafter.py", "loss.py"} <= {p.name for p in (FOLDER / folder).iterdir()}


@pytest.mark.parametrize("name", registry.MODULES)
def test_a_kind_is_complete(name):
    kind = registry.get(name)
    assert kind.name == name
    assert issubclass(kind.config, DrafterConfig)
    assert issubclass(kind.network, DrafterNet)
    assert issubclass(kind.drafter, NetDrafter)


def test_options_are_read_without_torch():
    code = "import sys, redrafter.drafters.options, redrafter.train.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
