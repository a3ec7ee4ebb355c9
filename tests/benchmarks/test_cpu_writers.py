"""Texts that benchmarks/cpu.py keeps in a file."""

import pytest

from benchmarks.cpu_writers import kept


def test_a_kept_text_is_written_once_and_only_for_its_model(tmp_path):
    asked = []

    def write(ids, most):
        asked.append((ids, most))
        return [*ids, most], 1.5, 2

    file = tmp_path / "references.json"
    first = kept(write, file, "tiny")
    assert first([1, 2], 8) == ([1, 2, 8], 1.5, 2)
    again = kept(write, file, "tiny")
    assert again([1, 2], 8) == ([1, 2, 8], 0.0, 2)
    assert asked == [([1, 2], 8)]
    assert again([1, 2], 9)[0] == [1, 2, 9], "another length is another text"
    assert len(asked) == 2
    with pytest.raises(SystemExit, match="give another file"):
        kept(write, file, "large")
