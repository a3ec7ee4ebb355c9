"""The wheel: complete, and usable outside the checkout."""

import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from redrafter.kernels.cpu.build import MACHINES
from redrafter.version import __version__
from tests.cli.test_train import SMALL
from tests.cli.test_transcribe import write_wav
from tests.helpers.letters import END, tokenizer
from tests.helpers.zoo import make_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path, **variables: str) -> str:
    """Outside the checkout: PYTHONPATH must not lead back into it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    env |= {"COLUMNS": "400", **variables}  # long paths are not cut
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no older build folder gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, source)
    run(sys.executable, "-m", "pip", *build, cwd=out)
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; the packages it depends on are those of this environment."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "env", with_pip=False)
    python = home / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home)
    [site] = (home / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_everything_but_notes_is_in_the_wheel(wheel):
    package = ROOT / "src" / "redrafter"
    wanted = {
        str(p.relative_to(ROOT / "src"))
        for p in package.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and (p.suffix != ".md" or "shipped" in p.parts)
    }
    with zipfile.ZipFile(wheel) as content:
        packed = {name for name in content.namelist() if name.startswith("redrafter/")}
    compiled = {name for name in packed if name.endswith(".so")}
    assert packed - compiled == wanted
    assert {Path(name).stem for name in compiled} == set(
        MACHINES.get(platform.machine(), ()) if sys.platform == "linux" else ()
    )
    for suffix in (".safetensors", ".cpp", ".h", ".html", "py.typed"):
        assert any(name.endswith(suffix) for name in packed), suffix


def test_the_command_runs_outside_the_checkout(installed):
    bin_ = installed / "env" / "bin"
    where = run(bin_ / "python", "-c", "import redrafter; print(redrafter.__file__)", cwd=installed)
    assert Path(where.strip()).is_relative_to(installed)
    assert run(bin_ / "redrafter", "--version", cwd=installed) == f"redrafter {__version__}\n"
    told = run(bin_ / "redrafter", "doctor", cwd=installed)
    assert __version__ in told
    assert str(installed) in told.replace("\n", "").replace(" ", "")


DECODE = """
import shutil, redrafter
from redrafter.kernels.cpu import library
assert not shutil.which("g++") and not shutil.which("clang++")
engine = redrafter.load(device="cpu")
assert engine.target.forward_kind == "packed, int16 activations"
assert "prebuilt" in library.library()._name
sides, options = (engine, engine.plain()), {"max_new_tokens": 12, "ignore_eos": True}
texts = [side.generate("Why is the sky blue?", **options).text for side in sides]
assert texts[0] == texts[1], texts
print(texts[0])
"""


def test_the_default_model_decodes_without_a_compiler(installed):
    """The folder of compiled libraries is new, so they come from the wheel."""
    python = installed / "env" / "bin" / "python"
    text = run(python, "-c", DECODE, cwd=installed, PATH=str(python.parent), REDRAFTER_CACHE=str(installed / "cache"))
    assert len(text.split()) > 3


README_OPTIONS = {
    "generate": ["--max-new-tokens", "4"],
    "chat": ["--max-new-tokens", "4"],
    "compare": ["--max-new-tokens", "4"],
    "eval": ["--max-new-tokens", "4", "--limit", "1"],
    "bench run": ["--max-new-tokens", "4", "--limit", "1", "--contenders", "recurrent"],
    "bench serve": ["--concurrency", "1", "--tokens", "4", "--answers", "1", "--least", "1", "--rounds", "1"],
    "train": [*SMALL, "--minutes", "0.5"],
    "distill": ["--texts", "4", "--max-new-tokens", "8", "--device", "cpu"],
    "tune": ["--quick"],
}
"""Added to the README's commands, so that they end soon."""


def readme_commands() -> list[list[str]]:
    """The lines of the README's shell blocks that call redrafter."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("redrafter ")]


def verb_of(command: list[str]) -> str:
    return " ".join(command[: 2 if command[0] == "bench" else 1])


@pytest.fixture
def workplace(installed, tmp_path) -> Path:
    """What the README's commands speak of: a model, questions, a recording."""
    make_model("llama", torch.float32, eos_token_id=END, **LARGER).save_pretrained(tmp_path / "my-model")
    tokenizer().save_pretrained(tmp_path / "my-model")
    shutil.copytree(ROOT / "benchmarks" / "data", tmp_path / "benchmarks" / "data")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "why is it so"}\n{"prompt": "who are we"}\n')
    write_wav(tmp_path / "talk.wav", bytes(32_000))
    return tmp_path


LARGER = {"hidden_size": 128, "intermediate_size": 128}
"""int4 rounds in groups of 128."""


class Commands:
    """Runs the README's commands with the installed program. A server lives until the next one is asked for."""

    def __init__(self, installed: Path, workplace: Path) -> None:
        self.program, self.workplace = str(installed / "env" / "bin" / "redrafter"), workplace
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
        self.env |= {"REDRAFTER_CACHE": str(installed / "cache")}
        self.server: subprocess.Popen[bytes] | None = None
        self.url = ""

    def run(self, command: list[str]) -> None:
        verb = verb_of(command)
        if verb == "serve":
            self.stop()
            self.serve(command)
            return
        more = README_OPTIONS.get(verb, []) + (["--url", self.url] if verb == "bench serve" else [])
        options = {"cwd": self.workplace, "env": self.env, "input": "hello\n", "capture_output": True, "text": True}
        done = subprocess.run([self.program, *command, *more], **options)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"

    def serve(self, command: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.url, log = f"http://127.0.0.1:{port}", self.workplace / "serve.log"
        with log.open("w") as out:
            whole = [self.program, *command, "--port", port]
            self.server = subprocess.Popen(whole, cwd=self.workplace, env=self.env, stdout=out, stderr=out)
        for _ in range(180):
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5).close()
                return
            except OSError:
                assert self.server.poll() is None, log.read_text()
                time.sleep(1)
        pytest.fail(f"{shlex.join(command)} never answered")

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(60) in (0, -signal.SIGTERM), "it ends when it is told to"
            self.server = None


def test_every_command_of_the_readme_runs_from_the_wheel_alone(installed, workplace):
    """In the README's order: `train` writes the drafter that a later command names."""
    commands, given = Commands(installed, workplace), readme_commands()
    assert {"generate", "compare", "serve", "train"} <= {verb_of(command) for command in given}
    try:
        for command in given:
            commands.run(command)
    finally:
        commands.stop()
