"""`redrafter doctor` prints what would run: model, drafter, shape, runtime, kernels and exactness."""

import json
import sys

import pytest
import torch

from redrafter import cache_folder
from redrafter.cli.main import main
from redrafter.engine import describe
from redrafter.kernels.cpu import library
from redrafter.targets import load_target, verdicts
from tests.helpers.zoo import make_model, recurrent_drafter


def doctor(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The output on one line."""
    assert main(["doctor", *options]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_default(capsys, monkeypatch):
    monkeypatch.setattr(describe, "load_target", lambda *a, **k: pytest.fail("the weights were loaded"))
    out = doctor(capsys, "--device", "cpu")
    for words in (
        "torch", "transformers", "cache folder", "profiles none", "one C++ call a pass", "rule seeded",
        "would run SmolLM2-135M-Instruct on cpu in float32, eager runtime",
        "drafter recurrent+ngram, W=1, L=4, N=4 (default shape)",
        "text equals plain decoding token for token; logits have the same bits",
    ):  # fmt: skip
        assert words in out
    assert "drafter recurrent, W=1, L=4" in doctor(capsys, "--device", "cpu", "--drafter", "recurrent")
    assert "drafter recurrent, W=3" in doctor(capsys, "--device", "cpu", "--drafter", "recurrent", "--dtype", "fp32")


def test_options_change_what_would_run(capsys):
    assert "drafter ngram, W=1, L=7, N=7 (default shape)" in doctor(capsys, "--drafter", "ngram", "--device", "cpu")
    out = doctor(capsys, "--drafter", "none", "--dtype", "bf16", "--device", "cpu")
    assert "drafter none: plain decoding" in out
    assert "on cpu in bfloat16" in out
    assert "none: the C++ kernels need float32" in out


def test_a_model_and_a_drafter_of_ones_own(capsys, tmp_path):
    target = load_target(make_model(dtype=torch.float32))
    target.model.save_pretrained(tmp_path / "model")
    recurrent_drafter(target).save(tmp_path / "drafter", target)
    out = doctor(capsys, "--model", str(tmp_path / "model"), "--drafter", str(tmp_path / "drafter"), "--device", "cpu")
    assert "would run model on cpu in float32, eager runtime" in out
    assert "drafter recurrent, W=3, L=3, N=5 (default shape)" in out


def test_a_missing_model_is_one_line(capsys, tmp_path):
    assert main(["doctor", "--model", str(tmp_path / "none")]) == 2
    assert "no model folder" in capsys.readouterr().err


def test_an_unusable_cache_folder_is_a_finding(capsys, monkeypatch):
    monkeypatch.setenv("REDRAFTER_CACHE", "/proc/redrafter")
    assert "set REDRAFTER_CACHE to a writable folder" in doctor(capsys)


def test_kernels_are_not_compiled_to_be_described(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "folder", lambda: tmp_path)
    monkeypatch.setattr(library, "compile_library", lambda *_: pytest.fail("compiled"))
    monkeypatch.delenv("REDRAFTER_NATIVE", raising=False)
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    assert "no C++ compiler" in library.status()
    monkeypatch.undo()
    monkeypatch.setenv("REDRAFTER_NATIVE", "0")
    assert library.status() == "off (REDRAFTER_NATIVE=0)"


def test_compiled_kernels_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "folder", lambda: tmp_path)
    monkeypatch.delenv("REDRAFTER_NATIVE", raising=False)
    monkeypatch.setattr(library, "find_compiler", lambda: sys.executable)  # anything that answers --version
    assert library.status() == "not compiled yet (done at first use)"
    path = library.compiled(sys.executable, library.chosen())
    cache_folder.keep(path, lambda folder: (folder.mkdir(), (folder / "library.so").write_bytes(b"code")))
    assert library.status() == "compiled"
    (path / "library.so").write_bytes(b"")
    assert library.status() == "not compiled yet (done at first use)"


def test_earlier_checks_are_counted_and_forgotten(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(verdicts, "folder", lambda: tmp_path)
    (tmp_path / "one.json").write_text("{}")
    assert "passed checks 1 kept in" in doctor(capsys, "--device", "cpu", "--drafter", "none")
    assert "passed checks 0 kept" in doctor(capsys, "--device", "cpu", "--drafter", "none", "--recheck")


def test_damaged_files_are_a_finding(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    cache_folder.keep(tmp_path / "native" / "one", lambda f: (f.mkdir(), (f / "one.so").write_bytes(b"machine code")))
    cache_folder.write_json(tmp_path / "profiles" / "two.json", {})
    none = "--device", "cpu", "--drafter", "none"
    assert "ok kept files 2, all as they were written" in doctor(capsys, *none)
    (tmp_path / "native" / "one" / "one.so").write_bytes(b"machine")
    for options in (none, (*none, "--recheck")):
        assert "!! kept files 2, damaged or of an earlier version: native/one — the next use" in doctor(
            capsys, *options
        )


def test_damage_that_changes_neither_size_nor_times_is_found_by_a_recheck(capsys, monkeypatch, tmp_path):
    """As a disk does it: here, the stamp of the last check is made to agree with the damaged file."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr(cache_folder, "LARGE", 1)
    path = cache_folder.keep(
        tmp_path / "native" / "one", lambda f: (f.mkdir(), (f / "one.so").write_bytes(b"machine code"))
    )
    (path / "one.so").write_bytes(b"Machine code")
    whole = cache_folder.sha256_of
    expected = json.loads((path / "manifest.json").read_text())["files"]["one.so"]["sha256"]
    monkeypatch.setattr(cache_folder, "sha256_of", lambda _: expected)
    assert cache_folder.is_intact(path)
    monkeypatch.setattr(cache_folder, "sha256_of", whole)
    assert "kept files 1, all as they were written" in doctor(capsys, "--device", "cpu", "--drafter", "none")
    out = doctor(capsys, "--device", "cpu", "--drafter", "none", "--recheck")
    assert "damaged or of an earlier version: native/one" in out
