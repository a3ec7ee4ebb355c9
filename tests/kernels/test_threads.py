"""How many threads the compiled CPU functions use, and that their helper threads survive forks and other callers."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from redrafter import load
from redrafter.errors import ConfigError
from redrafter.kernels import threads
from redrafter.kernels.cpu import library
from redrafter.kernels.cpu.matrices import Floats
from redrafter.kernels.cpu.packed import PackedMatrix


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_asked", None)
    yield
    torch.set_num_threads(before)


def test_one_thread_for_each_physical_core_unless_asked_for(monkeypatch):
    monkeypatch.setattr(threads, "physical_cores", lambda: 2)
    for torchs, wanted in ((1, 1), (2, 2), (4, 2)):
        torch.set_num_threads(torchs)
        assert threads.thread_count() == wanted
    threads.use_threads(4)
    assert threads.thread_count() == torch.get_num_threads() == 4
    with pytest.raises(ConfigError, match="threads must be at least 1, got 0"):
        load(threads=0)


def test_two_hardware_threads_of_a_core_count_as_one(tmp_path, monkeypatch):
    for cpu, core in enumerate(("0", "1", "0", "1")):
        place = tmp_path / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "core_id").write_text(core + "\n")
        (place / "physical_package_id").write_text("0\n")
    monkeypatch.setattr(threads, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert threads.physical_cores.__wrapped__() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 4}, raising=False)  # nothing describes CPU 4
    assert threads.physical_cores.__wrapped__() == 2


@pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")
def test_helpers_serve_several_callers_and_forked_processes():
    threads.use_threads(3)
    packed = PackedMatrix(Floats(np.random.default_rng(0).standard_normal((640, 96)).astype(np.float32)))
    x = torch.randn(5, 96)
    wanted, found = packed.multiply(x), []

    def many():
        found.append(all(torch.equal(packed.multiply(x), wanted) for _ in range(200)))

    callers = [threading.Thread(target=many) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 3
    if not hasattr(os, "fork"):
        return
    child = os.fork()
    if child == 0:
        same = packed.multiply(x).tolist() == wanted.tolist()
        tasks = Path("/proc/self/task")  # the child has helpers of its own again
        os._exit(0 if same and (not tasks.exists() or len(list(tasks.iterdir())) > 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
