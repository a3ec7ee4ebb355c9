"""How commands start: help without heavy imports, bad arguments refused before a model is loaded, odd environments."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from redrafter.cli import bench
from redrafter.cli.main import VERBS, main

QUESTIONS = "benchmarks/data/mt_bench.jsonl"
HELP = [[], *([verb] for verb in VERBS), *(["bench", verb] for verb in bench.VERBS)]
HEAVY = "torch transformers accelerate huggingface_hub numpy fastapi"


@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_imports_nothing_heavy(words):
    program = f"""
import sys
from redrafter.cli.main import main
try:
    main({[*words, "--help"]!r})
except SystemExit as ended:
    assert ended.code == 0
sys.stderr.write(" ".join(sorted(set({HEAVY!r}.split()) & set(sys.modules))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith(" ".join(["usage: redrafter", *words]))


def refused(capsys, *argv: str) -> str:
    """The one line of an error."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert out == ""
    assert lines[0].startswith("redrafter: ")
    return lines[0]


@pytest.fixture
def _nothing_is_loaded(monkeypatch):
    """Fails the test as soon as a model would be read."""

    def fail(*args, **kwargs):
        pytest.fail("a model was loaded")

    for name in ("pretrained.load_parts", "pretrained.default_model", "load.default_gguf", "load.default_model"):
        monkeypatch.setattr(f"redrafter.targets.{name}", fail)
    monkeypatch.setattr("redrafter.engine.speech._load", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


SAMPLING = [
    (["--temperature", "-1"], "temperature must be at least 0, got -1.0"),
    (["--top-p", "0"], "--top-p must be above 0, got 0.0"),
    (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    (["--stop", ""], "a stop string is empty"),
]
MODEL = [
    (["--drafter", "nowhere/at/all"], "no drafter 'nowhere/at/all'"),
    (["--drafter", "./nowhere"], "no drafter './nowhere'"),
    (["--drafter", "nobody/nothing"], "no drafter 'nobody/nothing'"),
    (["--drafter", __file__], "is a file"),
    (["--drafter", "./nowhere+ngram"], "no drafter './nowhere'"),
    (["--width", "0"], "width must be at least 1, got 0"),
    (["--gamma", "often"], "gamma must be one of"),
    (["--gamma", "heuristic", "--drafter", "ngram"], "for a drafter that is a causal LM"),
    (["--rule", "wishful"], "rule must be one of"),
    (["--runtime", "magic"], "argument --runtime: invalid choice: 'magic'"),
    (["--dtype", "float7"], "unknown dtype 'float7'"),
    (["--no-such-option"], "unrecognized arguments: --no-such-option; see redrafter"),
]
CASES = [
    *((verb, more, says) for verb in ("generate", "compare") for more, says in (*SAMPLING, *MODEL)),
    *(("chat", more, says) for more, says in SAMPLING),
    *(("eval", ["--questions", QUESTIONS, *more], says) for more, says in (SAMPLING[2], *MODEL[:2])),
    ("eval", ["--questions", QUESTIONS, "--temperatures", "-1"], "--temperatures must be at least 0"),
    *(("serve", ["--port", "0", *more], says) for more, says in MODEL[:2]),
    ("serve", ["--port", "0", "--rule", "guess"], "rule must be one of"),
    ("tune", ["--drafter", "./nowhere"], "no drafter './nowhere'"),
    ("tune", ["--temperature", "-1"], "temperature must be at least 0"),
    ("train", ["--out", "x", "--data", "./nowhere"], "--data: there is no folder nowhere"),
    ("train", ["--out", "x", "--init-from", "./nowhere"], "--init-from: there is no folder nowhere"),
    ("train", ["--out", "x", "--updates", "0"], "updates must be at least 1"),
    ("distill", ["--out", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    ("distill", ["--out", "x", "--texts", "many"], "--texts must be a whole number, got 'many'"),
    ("transcribe", ["--drafter", "./nowhere", "x.wav"], "no drafter './nowhere'"),
    ("transcribe", ["x.wav"], "no audio file x.wav"),
    ("export", ["./nowhere", "--to", "apple", "--out", "x"], "no drafter './nowhere'"),
    ("quantize", ["./nowhere", "--to", "int4", "--out", "x"], "no model folder ./nowhere"),
    ("bench", ["run", "--suite", QUESTIONS, "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    ("bench", ["run", "--suite", QUESTIONS, "--temperatures", "-1"], "--temperatures must be at least 0"),
    ("bench", ["run", "--suite", QUESTIONS, "--batch", "0"], "--batch must be at least 1, got 0"),
    ("bench", ["sampling", "speech", "--data", ".", "--drafter", "./nowhere"], "no drafter './nowhere'"),
    ("bench", ["sampling", "speech", "--data", ".", "--batch", "2"], "--batch must be 1, got 2"),
]


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(("verb", "arguments", "says"), CASES)
def test_refused_before_a_model_is_loaded(capsys, verb, arguments, says):
    prompt = ["hi"] if verb in ("generate", "compare") else []
    assert says in refused(capsys, verb, *arguments, *prompt)


@pytest.mark.parametrize(("port", "says"), [("99999", "at most 65535, got 99999"), ("-1", "at least 0, got -1")])
def test_a_port_out_of_range(capsys, port, says):
    assert f"--port must be {says}" in refused(capsys, "serve", f"--port={port}")


def test_a_host_that_cannot_be_encoded(capsys):
    assert "cannot listen on" in refused(capsys, "serve", "--port", "0", "--host", "x" * 80)


ENCODINGS = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


def start(*words: str, given: bytes = b"", **more) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "redrafter.cli.main", *words]
    done = subprocess.run(command, input=given, capture_output=True, check=False, **more)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("words", [["bench", "run", "--help"], ["train", "--help"]], ids=" ".join)
def test_help_in_ascii(words):
    done = start(*words, env=os.environ | ENCODINGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_standard_input_in_another_encoding():
    done = start("generate", "-", given="café".encode(), env=os.environ | ENCODINGS)
    assert done.returncode == 2
    assert done.stderr == "redrafter: the prompt is not ascii text; set PYTHONIOENCODING to its encoding\n"


def test_text_that_the_output_encoding_lacks_is_escaped(monkeypatch):
    from redrafter import Engine
    from redrafter.engine.request import Part, Stats

    written = io.BytesIO()
    part = Part(0, "café ×", [1], 0, Stats(rule="seeded", lossless=True), "stop")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(Engine, "stream", lambda self, *a, **k: iter([part]))
    assert main(["generate", "hi"]) == 0
    sys.stdout.flush()
    assert written.getvalue() == b"caf\\xe9 \\xd7\n"


@pytest.mark.parametrize("verb", [["generate", "hi"], ["doctor"]], ids=lambda words: words[0])
def test_a_user_without_a_home(capsys, monkeypatch, verb):
    """HOME is not set and the user has no passwd entry: `Path.home` raises RuntimeError."""

    def nowhere(cls):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    for name in ("HOME", "REDRAFTER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if verb == ["doctor"]:
        assert main(verb) == 0
        assert "set REDRAFTER_CACHE" in " ".join(capsys.readouterr().out.split())
    else:
        assert "set REDRAFTER_CACHE" in refused(capsys, *verb)


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "redrafter", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("redrafter ")
    failed = subprocess.run([sys.executable, "-m", "redrafter", "no-verb"], capture_output=True, check=False)
    assert failed.returncode == 2
