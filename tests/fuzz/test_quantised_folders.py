"""Damaged folders of quantised models: each is refused in one line or runs a pass, in bounded time and memory."""

import pytest

CASES, SECONDS = 400, 1800
SLOWEST, MEGABYTES = 20.0, 400


@pytest.mark.fuzz
def test_quantised_folders(tried):
    found = tried("tests.fuzz.quantised_folders", CASES, SECONDS)
    assert found["ends"]["refused"] > CASES / 4
    assert CASES - found["ends"]["refused"] > CASES / 20
    assert found["slowest"] < SLOWEST
    assert found["grown"] < MEGABYTES
