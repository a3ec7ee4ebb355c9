"""The option that `.ci/run` gives: a test may be skipped for want of a GPU and for no other reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = {
    "gpu": "@pytest.mark.skipif(True, reason='needs a GPU')\ndef test_one(): pass",
    "browser": "@pytest.mark.skipif(True, reason='no Chromium here')\ndef test_one(): pass",
    "module": "pytest.importorskip('no_such_module')",
    "call": "def test_one(): pytest.skip('not today')",
}


def run(folder: Path, which: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A test that is skipped and one that passes, in a process of their own."""
    (folder / "conftest.py").write_text("from tests.helpers.skips import *\n")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (folder / "test_it.py").write_text(f"import pytest\n{TESTS[which]}\n")
    (folder / "test_other.py").write_text("def test_other(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *options, str(folder)]
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}  # `.ci/run` gives the option there
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some plugins take seconds to import
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("which", ["browser", "module", "call"])
def test_other_skips_fail_the_run(tmp_path, which):
    done = run(tmp_path, which, "--no-skips-but-gpu")
    assert done.returncode == 1, done.stdout
    assert "skipped, which --no-skips-but-gpu forbids" in done.stdout
    assert "test_it.py" in done.stdout


def test_workers_skips_count_too(tmp_path):
    assert run(tmp_path, "call", "--no-skips-but-gpu", "-n", "1").returncode == 1


def test_gpu_skips_pass_and_so_do_all_without_the_option(tmp_path):
    assert run(tmp_path, "gpu", "--no-skips-but-gpu").returncode == 0
    assert run(tmp_path, "browser").returncode == 0
