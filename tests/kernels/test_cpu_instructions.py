"""The same passes under every set of instructions that this CPU has: the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redrafter.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(library.library() is None, reason="no C++ compiler here"),
    pytest.mark.slow,  # each set is compiled once, which takes half a minute
]
ROOT = Path(__file__).parents[2]
FUSED = [name for name in library.supported() if name != "portable"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each set of instructions makes of the same inputs, by its name."""
    folder, made = tmp_path_factory.mktemp("results"), {}
    for name in library.supported():
        command = [sys.executable, "-m", "tests.helpers.cpu_results", str(folder / f"{name}.npz")]
        paths = {"REDRAFTER_INSTRUCTIONS": name, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, cwd=ROOT, env=os.environ | paths, check=True)
        with np.load(folder / f"{name}.npz") as file:
            made[name] = dict(file)
    return made


def differing(one, other):
    """What differs, without what passes through the C library's logarithm."""
    assert list(one) == list(other)
    return [name for name in one if one[name].tobytes() != other[name].tobytes() and not name.startswith("about")]


@pytest.mark.parametrize("name", FUSED[1:])
def test_every_set_gives_the_same_bits(results, name):
    assert sum("16 bits" in each for each in results[name]) > 150
    assert differing(results[FUSED[0]], results[name]) == []


@pytest.mark.skipif(not FUSED, reason="this CPU has no fused operations")
def test_twin_a_set_that_fuses_no_operations(results):
    """Its sums of integers are the same; those of scaled sums, and of floats, are not."""
    assert len(differing(results[FUSED[0]], results["portable"])) > 100
