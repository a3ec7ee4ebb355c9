"""The command line: what it prints, and one clear line with exit code 2 for bad input."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from redrafter import Engine
from redrafter.cache_folder import cache_folder
from redrafter.cli import options
from redrafter.cli.main import main
from redrafter.config import SamplingParams
from redrafter.targets import default, load_target
from tests.helpers.bytes import byte_target
from tests.helpers.zoo import make_model, recurrent_drafter


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model on disk, with the default's tokenizer, which is larger than its vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    make_model(dtype=torch.float32).save_pretrained(folder)
    return folder


LOADED = {}


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch):
    """The default model, for all commands that run in this process; those that must not find it have other caches."""

    def load(model=None, **given):
        key = cache_folder(), repr(given)
        if model is not None:
            return load_target(model, **given)
        if key not in LOADED:
            LOADED[key] = load_target(**given)
        return LOADED[key]

    monkeypatch.setattr("redrafter.engine.engine.load_target", load)


@pytest.fixture
def drafter_folder(tmp_path):
    target = load_target(make_model(dtype=torch.float32))
    recurrent_drafter(target).save(tmp_path / "drafter", target)
    return tmp_path / "drafter"


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def said(err: str) -> list[str]:
    """Lines of standard error, without those that a slow machine adds."""
    return [line for line in err.splitlines() if line.strip() and not re.fullmatch(r"loading, \d+ s", line)]


def bad(capsys, *argv: str) -> str:
    """The one line of an error."""
    code, _, err = run(capsys, *argv)
    lines = said(err)
    assert code == 2
    assert len(lines) == 1, err
    assert lines[0].startswith("redrafter: ")
    return lines[0]


def test_missing_model(capsys, tmp_path, monkeypatch):
    assert "no model folder" in bad(capsys, "generate", "--model", str(tmp_path / "none"), "hi")
    assert "no config.json" in bad(capsys, "generate", "--model", str(tmp_path), "hi")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "no model 'nobody/nothing'" in bad(capsys, "generate", "--model", "nobody/nothing", "hi")


def test_corrupt_model(capsys, tmp_path, model_folder):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes()[:500])
    assert "cannot load the weights" in bad(capsys, "generate", "--model", str(tmp_path), "hi")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--length", "0"], "length must be at least 1"),
        (["--nodes", "0"], "nodes must be at least 1"),
        (["--gamma", "confidence:much"], "gamma's constant must be a number"),
        (["--gamma", "confidence:1.5"], "gamma's threshold must be at most 1"),
        (["--rule", "rejection", "--branching", "2,x"], "--branching takes integers"),
        (["--branching", "2"], "branching belongs to the rejection rule"),
    ],
)
def test_bad_options(capsys, monkeypatch, model_folder, arguments, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert says in bad(capsys, "generate", "--model", str(model_folder), *arguments, "hi")


def test_bad_options_with_the_default(capsys):
    assert "prompt is empty" in bad(capsys, "generate", "  ")
    too_long = "word " * 9000
    line = bad(capsys, "generate", "--raw", too_long)
    assert "a context of 8192" in line
    assert len(line) < 300


def test_wrong_drafter(capsys, drafter_folder):
    line = bad(capsys, "generate", "--drafter", str(drafter_folder), "hi")
    assert "the drafter expects a vocabulary of 40, but the target SmolLM2-135M-Instruct has 49152" in line
    weights = drafter_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert "cannot read" in bad(capsys, "generate", "--drafter", str(drafter_folder), "hi")


def test_unreadable_cache_folder(capsys, monkeypatch):
    monkeypatch.setenv("REDRAFTER_CACHE", "/proc/redrafter")
    assert "cannot use the cache folder /proc/redrafter" in bad(capsys, "generate", "hi", "--dtype", "fp32")


def test_no_disk_space_while_converting(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path))
    monkeypatch.setattr(default.shutil, "disk_usage", lambda p: type("Usage", (), {"free": 5})())
    assert f"no space left in {tmp_path}" in bad(capsys, "generate", "hi", "--dtype", "fp32")


def test_generate_prints_the_text_and_its_figures(capsys):
    code, out, err = run(capsys, "generate", "--max-new-tokens", "6", "What is the capital of France?")
    assert code == 0
    assert "Paris" in out
    assert "tokens/step" in err


def test_a_pipe_gets_the_models_text_as_it_is(capsys, monkeypatch):
    from redrafter.engine.request import Part, Stats

    text = "a\tb [bold]c[/bold]\r\n[/i]"
    part = Part(0, text, [1], 0, Stats(rule="seeded", lossless=True), "stop")
    monkeypatch.setattr(Engine, "stream", lambda self, *a, **k: iter([part]))
    _, out, _ = run(capsys, "generate", "hi")
    assert out == text + "\n"


def test_no_such_device(capsys):
    assert "no device 'banana' here" in bad(capsys, "generate", "--device", "banana", "hi")


def test_generate_reads_standard_input(capsys, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?"))
    code, out, err = run(capsys, "generate", "--quiet", "--max-new-tokens", "6", "-")
    assert code == 0
    assert "Paris" in out
    assert err == ""


def test_chat_remembers_and_ends_with_an_empty_line(capsys, monkeypatch):
    turns = iter(["My name is Ada.", "What is my name?", ""])
    monkeypatch.setattr("builtins.input", lambda *a: next(turns))
    heard = []
    encode = Engine.encode
    monkeypatch.setattr(Engine, "encode", lambda self, said: (heard.append(list(said)), encode(self, said))[1])
    code, out, _ = run(capsys, "chat", "--max-new-tokens", "8", "--system", "Be brief.")
    assert code == 0
    assert out.count("tokens/step") == 2
    assert [m["role"] for m in heard[1]] == ["system", "user", "assistant", "user"]
    assert heard[1][:2] == heard[0]
    assert heard[1][2]["content"] in out.replace("\n", " ")


def test_bytes_that_are_no_text(capsys, monkeypatch):
    import io

    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe bad"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert "not utf-8" in bad(capsys, "generate", "-")


def test_interrupt_while_importing_is_one_line_too(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("redrafter.cli.main.import_module", interrupted)
    code, _, err = run(capsys, "generate", "hi")
    assert code == 130
    assert err.strip() == "redrafter: interrupted"


def test_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("redrafter.cli.generate.run", interrupted)
    monkeypatch.setattr("redrafter.cli.train.run", interrupted)
    code, _, err = run(capsys, "generate", "hi")
    assert code == 130
    assert err.strip() == "redrafter: interrupted"
    code, _, err = run(capsys, "train", "--out", "x")
    assert code == 130
    assert err.strip() == "redrafter: interrupted; to go on from here, give the same command again"


def test_help_texts_are_the_fields_docstrings():
    texts = options.field_help(SamplingParams)
    assert texts["temperature"].startswith("0 is greedy")
    assert set(texts) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.slow
def test_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "redrafter.cli.main", "generate", "--model", "/none/such", "hi"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said(done.stderr) == ["redrafter: no model folder /none/such"]
    assert done.stdout == ""


def test_generate_with_a_grammar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = byte_target()
    target.model.save_pretrained(tmp_path / "toy")
    target.tokenizer.save_pretrained(tmp_path / "toy")
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')
    common = ["generate", "name", "--model", str(tmp_path / "toy"), "--drafter", "ngram", "--quiet", "--raw"]
    for given, text in (
        (["--regex", "ab{3}"], "abbb"),
        (["--json-schema", str(tmp_path / "schema.json"), "--max-new-tokens", "8"], '{"a": 1'),
    ):
        assert main([*common, *given]) == 0
        assert capsys.readouterr().out.startswith(text)
    for given, what in (
        (["--json-schema", str(tmp_path / "none.json")], "cannot read"),
        (["--json-schema", str(tmp_path / "toy" / "model.safetensors")], "not UTF-8"),
        (["--regex", "(a"], "grammar is not valid"),
    ):
        assert main([*common, *given]) == 2
        assert what in capsys.readouterr().err
