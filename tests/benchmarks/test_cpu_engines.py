"""Other engines of benchmarks/cpu.py: the process, its lines and its errors. The engines themselves are not needed."""

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import cpu_engines
from benchmarks.cpu_engines import OtherEngine, named_python

ECHO = """
print("a converter's output")
about = {"threads": threads, "gguf": gguf, "scratch": os.path.isdir(scratch)}
def write(ids, most):
    return [i for i in ids if i not in eos][:most]
"""


def started(python: str = sys.executable) -> OtherEngine:
    return OtherEngine("mine", python, Path("model.gguf"), Path("folder"), (2,))


def test_an_engine_writes_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_engines.ENGINES, "mine", ECHO)
    engine = started()
    try:
        assert engine.about["gguf"] == "model.gguf"
        assert engine.about["scratch"]
        for ids, most, expected in (([5, 2, 6, 7], 2, [5, 6]), ([8], 4, [8])):
            tokens, seconds, steps = engine(ids, most)
            assert tokens == expected
            assert seconds > 0
            assert steps == len(expected) - 1
    finally:
        engine.close()
    assert engine.child.returncode == 0
    assert not Path(engine.scratch.name).exists()


def test_an_engine_that_is_missing_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_engines.ENGINES, "mine", "import no_such_engine")
    with pytest.raises(SystemExit, match=r"cannot run mine: ModuleNotFoundError: No module named 'no_such_engine'$"):
        started()
    with pytest.raises(SystemExit, match=r"^nowhere/python cannot be started \(No such file or directory\): give the"):
        started("nowhere/python")


def test_engines_are_given_by_name_and_interpreter() -> None:
    assert named_python("openvino=/opt/a=b/python") == ("openvino", "/opt/a=b/python")
    for text in ("openvino", "openvino=", "nothing=python"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"NAME among llama_cpp, .*, got '{text}'"):
            named_python(text)
