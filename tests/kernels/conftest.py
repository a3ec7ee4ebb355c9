"""Fixtures for the tests of kernels."""

import pytest

from redrafter import kernels
from tests.helpers.verification import BIG


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
