"""Damaged GGUF files: each is refused in one line or runs a pass, and reads no foreign memory."""

import pytest

CASES, SECONDS = 2400, 3600
SLOWEST, MEGABYTES = 20.0, 400


@pytest.mark.fuzz
def test_gguf_files(tried):
    found = tried("tests.fuzz.gguf_files", CASES, SECONDS)
    assert found["ends"]["refused"] > CASES / 10
    assert CASES - found["ends"]["refused"] > CASES / 10
    assert found["slowest"] < SLOWEST
    assert found["grown"] < MEGABYTES
