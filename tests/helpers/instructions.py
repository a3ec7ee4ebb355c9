"""Runs a test with each set of CPU instructions that this CPU has."""

import pytest

from redrafter.kernels.cpu import library

INSTRUCTIONS = [
    name if name in (library.chosen(), "portable") else pytest.param(name, marks=pytest.mark.slow)
    for name in library.supported()
]
"""Each set of instructions is compiled once for the tests, which takes half a minute."""


@pytest.fixture(params=INSTRUCTIONS)
def lib(request, monkeypatch):
    """The compiled functions for one set of instructions, which all code uses meanwhile."""
    monkeypatch.setenv("REDRAFTER_INSTRUCTIONS", request.param)
    library.library.cache_clear()
    yield library.library()
    library.library.cache_clear()
