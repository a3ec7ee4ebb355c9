"""Fixtures of the fuzz tests."""

import json
import shutil

import pytest

from tests.helpers import sanitised


@pytest.fixture(scope="session")
def library(request):
    """The folder of the compiled functions with sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("the sanitizers need g++")
    return sanitised.make(request.config.cache.mkdir("sanitised"))


@pytest.fixture
def tried(library):
    """Runs the cases of a module under the sanitizers -> how they ended. It asserts that nothing failed."""

    def run(module, count, seconds):
        done = sanitised.run(library, module, count, seconds=seconds)
        assert done.returncode == 0, done.stderr[-8000:]
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"\n{module}: { ({name: value for name, value in found.items() if name != 'failed'}) }")
        assert not found["failed"], "\n".join(found["failed"])
        assert found["cases"] == sum(found["ends"].values()) == count
        return found

    return run
