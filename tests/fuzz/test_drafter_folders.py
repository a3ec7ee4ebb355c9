"""Damaged drafter folders of every kind: each is refused in one line or used, and reads no foreign memory."""

import tempfile
from pathlib import Path

import pytest

from tests.helpers import sanitised

MODULE = "tests.fuzz.drafter_folders"
CASES, SECONDS = 2500, 3600
SLOWEST, MEGABYTES = 20.0, 400
"""What one folder may take, and by how much all of them may raise the memory."""


@pytest.mark.fuzz
def test_drafter_folders(tried):
    found = tried(MODULE, CASES, SECONDS)
    used = CASES - found["ends"]["refused"]
    assert found["ends"]["refused"] > CASES / 10
    assert used > CASES / 20
    assert len(found["ends"]) >= 8, "folders of most kinds are used in spite of the damage"
    assert found["slowest"] < SLOWEST
    assert found["grown"] < MEGABYTES


@pytest.mark.fuzz
def test_twin_an_index_that_nobody_checks_is_reported(library):
    with tempfile.TemporaryDirectory() as scratch:
        sanitised.make_unchecked(library, Path(scratch))
    done = sanitised.run(library, MODULE, 200, "unchecked", seconds=600)
    assert done.returncode == sanitised.REPORTED
    assert "AddressSanitizer" in done.stderr
    assert "take_rows" in done.stderr
