"""The cache folder: whole or not at all on the disk, checked at each reading, one writer at a time."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from redrafter import cache_folder as cache
from redrafter.errors import CacheUnavailable, CorruptCheckpoint


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def written():
    """A function that writes a folder, and a list of the places it wrote to."""
    places = []

    def write(folder):
        places.append(folder)
        (folder / "more").mkdir(parents=True)
        (folder / "library.so").write_bytes(b"machine code")
        (folder / "more" / "chat_template.jinja").write_text("{{ messages }}")

    return write, places


def test_a_folder_is_written_once(root, written):
    write, places = written
    path = root / "native" / "one"
    assert cache.keep(path, write) == cache.keep(path, write) == path
    assert len(places) == 1
    assert [p.name for p in path.parent.iterdir()] == ["one"], "no scratch folder is left"
    assert (path / "library.so").read_bytes() == b"machine code"


@pytest.mark.parametrize(
    "harm",
    [
        lambda f: (f / "library.so").write_bytes(b"machine"),
        lambda f: (f / "library.so").write_bytes(b""),
        lambda f: (f / "library.so").write_bytes(b"Machine code"),
        lambda f: (f / "more" / "chat_template.jinja").write_text("{{ message  }}"),
        lambda f: (f / "library.so").unlink(),
        lambda f: (f / "chat_template.jinja").write_text("another"),
        lambda f: (f / "manifest.json").unlink(),
        lambda f: (f / "manifest.json").write_text("[]"),
        lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"),
        lambda f: (f / "manifest.json").write_text('{"files": {"library.so": 3}}'),
    ],
    ids=["cut", "empty", "byte", "template", "gone", "new", "no-manifest", "list", "bytes", "odd"],
)
def test_a_damaged_folder_is_made_again(root, written, harm, caplog):
    write, places = written
    path = cache.keep(root / "native" / "one", write)
    harm(path)
    assert not cache.is_intact(path)
    assert dict(cache.entries()) == {path: False}
    cache.keep(path, write)
    assert len(places) == 2
    assert "is damaged; making it again" in caplog.text
    assert cache.is_intact(path)
    assert dict(cache.entries()) == {path: True}


def test_a_failed_write_leaves_what_was_there(root, written):
    def fail(folder):
        folder.mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = cache.keep(root / "native" / "one", written[0])
    with pytest.raises(OSError, match="No space"):
        cache.keep(path, fail, lambda _: False)
    assert cache.is_intact(path)
    assert not list(path.parent.glob(f".*{cache.SCRATCH}"))


CHILD = """
import os, signal, sys
from pathlib import Path
from redrafter.cache_folder import keep
def write(folder):
    folder.mkdir()
    (folder / "half").write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
keep(Path(sys.argv[1]), write)
"""


def test_scratch_folders_stay_while_their_process_lives_and_go_when_it_was_killed(root, written):
    write, _ = written
    slow, scratch = root / "native" / "slow", root / "native" / f".slow{cache.SCRATCH}"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(slow)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"writing\n"
        cache.keep(root / "native" / "one", write)
        assert (scratch / "half").exists(), "another process is writing it"
        waiting = threading.Thread(target=cache.keep, args=(slow, write))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive(), "it waits for the lock"
        child.send_signal(signal.SIGKILL)
        waiting.join(10)
        assert cache.is_intact(slow), "the lock of a killed process is free"
        scratch.mkdir()
        assert dict(cache.entries()) == {root / "native" / "one": True, slow: True}
        assert not scratch.exists()
    finally:
        child.kill()
        child.communicate()


def test_other_programs_files_are_left_alone(root, written):
    others = [root / ".other.part", root / ".other.lock", root / "own"]
    root.mkdir()
    for path in others:
        path.write_text("mine")
    cache.keep(root / "one", written[0])
    assert all(path.read_text() == "mine" for path in others)


def test_a_lock_keeps_threads_and_processes_apart(root):
    """Its file goes at each release, and is made anew at each acquisition."""
    root.mkdir()
    inside, most = [], []

    def work():
        for _ in range(50):
            with cache.process_lock(root / ".lock"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert max(most) == 1
    assert list(root.iterdir()) == []


def test_several_at_once_write_once(root, written):
    write, places = written
    threads = [threading.Thread(target=cache.keep, args=(root / "one", write)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(places) == 1


@pytest.mark.parametrize("content", [{"a": [1, 2.5, None], "ü": float("inf")}, "sdpa", True, ["x"]])
def test_json_is_read_as_it_was_written(root, content):
    path = root / "profiles" / "one.json"
    cache.write_json(path, content)
    assert cache.read_json(path) == content
    assert [p.name for p in path.parent.iterdir()] == ["one.json"]


def test_every_damaged_byte_of_a_json_file_is_noticed(root):
    path = root / "profiles" / "one.json"
    content = {"shape": "4x4", "cost": 12.5}
    cache.write_json(path, content)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for byte in (whole[place] ^ 1, 0xFF, 0):
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                assert cache.read_json(path) == content, "only white space can differ"
            except CorruptCheckpoint:
                continue
        path.write_bytes(whole[:place])
        if whole[place:].strip():
            with pytest.raises(CorruptCheckpoint, match="is damaged, or of an earlier version"):
                cache.read_json(path)
            assert dict(cache.entries()) == {path: False}


@pytest.mark.parametrize("text", ["[1]", "{}", '{"sha256": 1}', "[" * 100_000, '{"verdict": "sdpa"}'])
def test_json_of_another_form_is_refused(root, text):
    root.mkdir()
    (root / "one.json").write_text(text)
    with pytest.raises(CorruptCheckpoint):
        cache.read_json(root / "one.json")


def test_everything_is_synced_before_it_gets_its_name(root, written, monkeypatch):
    synced, renamed = [], []
    whole = cache._sync
    monkeypatch.setattr(cache, "_sync", lambda path: (synced.append((path.name, bool(renamed))), whole(path)))
    replace = cache.Path.replace
    monkeypatch.setattr(cache.Path, "replace", lambda a, b: (renamed.append(b), replace(a, b))[1])
    cache.keep(root / "native" / "one", written[0])
    before = {name for name, later in synced if not later}
    assert before == {"library.so", "more", "chat_template.jinja", "manifest.json", f".one{cache.SCRATCH}"}
    assert synced[-1] == ("native", True)


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were hashed."""
    names, whole = [], cache.sha256_of
    monkeypatch.setattr(cache, "sha256_of", lambda path: (names.append(path.name), whole(path))[1])
    return names


@pytest.fixture
def large(root, written, monkeypatch, hashed):
    """A kept folder whose library counts as large."""
    monkeypatch.setattr(cache, "LARGE", 10)
    folder = cache.keep(root / "native" / "one", lambda f: (f.mkdir(), (f / "weights").write_bytes(b"weights" * 9)))
    assert cache.is_intact(folder)
    hashed.clear()
    return folder


def test_a_large_file_is_hashed_again_only_if_size_or_times_differ(large, hashed):
    assert cache.is_intact(large)
    assert hashed == []
    os.utime(large / "weights", ns=(1, 1))
    assert cache.is_intact(large)
    assert hashed == ["weights"]
    assert cache.is_intact(large)
    assert hashed == ["weights"], "the new time is kept"
    cache.forget_checks()
    assert cache.is_intact(large)
    assert hashed == ["weights"] * 2


def test_damage_with_the_times_set_back_is_noticed(large):
    """utime sets a file's times, but not that of its last change."""
    found = (large / "weights").stat()
    with (large / "weights").open("r+b") as file:
        file.write(b"W")
    os.utime(large / "weights", ns=(found.st_atime_ns, found.st_mtime_ns))
    assert not cache.is_intact(large)


def test_a_damaged_stamp_is_no_proof(large, hashed):
    [stamp] = (cache.cache_folder() / cache.CHECKS).glob("*.json")
    stamp.write_text(stamp.read_text().replace("weights", "Weights"))
    assert cache.is_intact(large)
    assert hashed == ["weights"]


def test_a_cache_that_cannot_be_written_is_hashed_every_time(large, hashed, monkeypatch):
    def fail(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    cache.forget_checks()
    monkeypatch.setattr(cache, "write_json", fail)
    for _ in range(2):
        hashed.clear()
        assert cache.is_intact(large)
        assert hashed == ["weights"]


@pytest.mark.parametrize("kept", [True, False], ids=["a large library", "a small library"])
def test_a_small_file_is_hashed_at_each_start(root, written, hashed, kept, monkeypatch):
    monkeypatch.setattr(cache, "LARGE", 1 if kept else cache.LARGE)
    path = cache.keep(root / "native" / "one", written[0])
    cache.is_intact(path)
    hashed.clear()
    cache.is_intact(path)
    assert sorted(hashed) == ([] if kept else ["chat_template.jinja", "library.so"])


def test_without_a_home_there_is_one_line(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    for name in ("REDRAFTER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.Path, "home", fail)
    with pytest.raises(CacheUnavailable, match="set REDRAFTER_CACHE"):
        cache.cache_folder()
