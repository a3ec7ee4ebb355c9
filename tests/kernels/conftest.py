"""Fixtures for the tests of kernels, and which files of this folder are collected."""

import os

import pytest

from redrafter import kernels
from tests.helpers.verification import BIG

# It needs a cross compiler, an emulator and packages for 64-bit ARM, so only `make test-neon` runs it.
collect_ignore = [] if os.environ.get("REDRAFTER_NEON") else ["test_cpu_neon.py"]


@pytest.fixture
def both(monkeypatch):
    """Runs a function by the oracle and by the kernel."""
    from redrafter.kernels.verify import triton as kernel  # not every machine has Triton

    if not BIG:  # tiles so small that a small vocabulary has many, the last one not full
        monkeypatch.setattr(kernel, "CHOICE", 256)

    def run(function, *args, **options):
        found = []
        for implementation in ("naive", "triton"):
            with kernels.force(implementation):
                found.append(function(*args, **options))
        return found

    return run
