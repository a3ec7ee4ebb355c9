"""How the C++ for CPUs is found, compiled and loaded."""

import functools
import os
import shutil
import threading
from types import SimpleNamespace

import pytest

from redrafter.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")


def test_instructions_can_be_forced(monkeypatch):
    assert library.chosen() == library.supported()[0]
    monkeypatch.setenv("REDRAFTER_INSTRUCTIONS", "portable")
    assert library.chosen() == "portable"
    monkeypatch.setenv("REDRAFTER_NATIVE", "0")
    assert not library.can_run()


@pytest.mark.parametrize(
    ("system", "features", "sets"),
    [
        ("linux", 0x119FFB, ["neon_dotprod", "neon", "portable"]),  # Neoverse N1
        ("linux", 0x415FFB, ["neon", "portable"]),  # A64FX
        ("darwin", None, ["neon_dotprod", "neon", "portable"]),
    ],
)
def test_which_sets_of_instructions_an_arm_cpu_has(monkeypatch, system, features, sets):
    """Linux gives each process the CPU's features, entry 16 of what getauxval reads. macOS has no such function."""
    c_library = SimpleNamespace() if features is None else SimpleNamespace(getauxval={16: features}.__getitem__)
    monkeypatch.setattr(library, "ctypes", SimpleNamespace(CDLL=lambda _: c_library))
    monkeypatch.setattr(library, "sys", SimpleNamespace(platform=system))
    for machine in ("aarch64", "arm64"):
        monkeypatch.setattr(library, "platform", SimpleNamespace(machine=lambda: machine))  # noqa: B023
        assert library.supported() == sets


@pytest.mark.parametrize(
    ("has", "granted", "fastest"),
    [
        ("amx_bf16 amx_tile amx_int8", True, "avx512_amx"),
        ("amx_bf16 amx_tile amx_int8", False, "avx512_vnni"),
        ("amx_tile amx_int8", True, "avx512_vnni"),  # a virtual machine may hide a part
    ],
)
def test_amx_where_the_operating_system_lets_a_process_use_it(monkeypatch, caplog, has, granted, fastest):
    monkeypatch.setattr(library, "platform", SimpleNamespace(machine=lambda: "x86_64"))
    monkeypatch.setattr(library.torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(library.torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(library, "cpu_features", lambda: f"flags : fpu {has} sse")
    c_library = SimpleNamespace(syscall=lambda *_: 0 if granted else -1)
    monkeypatch.setattr(library, "ctypes", SimpleNamespace(CDLL=lambda _: c_library))
    monkeypatch.setattr(library, "can_use_amx", functools.cache(library.can_use_amx.__wrapped__))
    with caplog.at_level("INFO"):
        assert [library.supported()[0] for _ in range(2)] == [fastest] * 2
    assert caplog.text.count("does not let this process use AMX") == (not granted)


def test_where_the_fastest_instructions_fail_the_next_are_used(monkeypatch):
    monkeypatch.setattr(library, "supported", lambda: ["fastest", "fast", "portable"])
    monkeypatch.setattr(library, "load", {"fastest": None, "fast": "compiled", "portable": "slow"}.get)
    assert library.library.__wrapped__() == "compiled"
    monkeypatch.setenv("REDRAFTER_INSTRUCTIONS", "portable")
    assert library.library.__wrapped__() == "slow"
    monkeypatch.setattr(library, "load", lambda _: None)
    assert library.library.__wrapped__() is None


def test_a_wheels_library_needs_no_compiler(tmp_path, monkeypatch):
    made, path = library.library(), tmp_path / f"{library.chosen()}.so"
    shutil.copy(made._name, path)
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    assert library.can_run()
    assert library.load.__wrapped__(library.chosen())._name == str(path)
    path.unlink()
    assert not library.can_run()
    assert library.load.__wrapped__(library.chosen()) is None


def test_a_library_that_does_not_load_is_compiled(tmp_path, monkeypatch):
    (tmp_path / f"{library.chosen()}.so").write_bytes(b"made for another system")
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    assert library.load.__wrapped__(library.chosen())._name == library.library()._name


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A small source that was never compiled, and an empty folder for it."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "HERE", tmp_path / "source")
    monkeypatch.setattr(library, "SIGNATURES", {"one": []})
    monkeypatch.setattr(library, "TRY", "import ctypes, sys; assert ctypes.CDLL(sys.argv[1]).one() == 1")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    library.library.cache_clear()
    yield tmp_path / "native"
    library.library.cache_clear()


def libraries(folder):
    return sorted(folder.glob("*/*.so"))


def test_compiled_once_and_found_again(fresh):
    assert library.library().one() is None
    [made] = libraries(fresh)
    stamp = os.stat(made).st_mtime_ns
    library.library.cache_clear()
    assert library.library() is not None
    assert [os.stat(p).st_mtime_ns for p in libraries(fresh)] == [stamp]
    (library.HERE / "one.cpp").write_text('extern "C" int one() { return 2 - 1; }')
    library.library.cache_clear()
    assert library.library() is not None
    assert len(libraries(fresh)) == 2, "another source is another library"


def test_several_at_once_leave_one_whole_library(fresh):
    made = []
    threads = [threading.Thread(target=lambda: made.append(library.load(library.chosen()))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(made)
    assert [str(path) for path in libraries(fresh)] == list({each._name for each in made})


@pytest.mark.parametrize("size", [0, 100, 4096], ids=["empty", "cut in its header", "cut behind it"])
def test_a_truncated_library_is_compiled_again(fresh, size):
    """Loading it would end the process: the loader maps pages that are not there."""
    library.library()
    [made] = libraries(fresh)
    whole = made.read_bytes()
    made.unlink()  # it is loaded: this process must not see the truncated one
    made.write_bytes(whole[:size])
    assert library.status() == "not compiled yet (done at first use)"
    library.library.cache_clear()
    assert library.library().one() is None
    assert made.stat().st_size > size
    assert library.status() == "compiled"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (("find_compiler", lambda: None), "no C++ compiler"),
        (("find_compiler", lambda: shutil.which("false")), "non-zero exit status 1"),
        (("TRY", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"), "SIGILL"),
        (("folder", lambda: library.HERE / "one.cpp"), "one.cpp"),
    ],
    ids=["no compiler", "compiler fails", "illegal instruction", "no folder"],
)
def test_without_a_library_there_is_one_line_and_torch(fresh, monkeypatch, caplog, harm, said):
    monkeypatch.setattr(library, *harm)
    with caplog.at_level("INFO"):
        assert library.library() is None
        assert library.library() is None
    assert caplog.text.count("torch alone") == 1
    assert said in caplog.text
