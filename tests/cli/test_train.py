"""`redrafter train` as a user meets it: one command, killed at any moment, on two processes, with bad input."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from redrafter.cli.main import main
from redrafter.errors import ConfigError
from redrafter.targets import load_target
from tests.helpers.clock import Clock
from tests.helpers.letters import END, tokenizer
from tests.helpers.zoo import make_model

SMALL = [
    "--texts", "24", "--max-new-tokens", "16", "--prompt-tokens", "24", "--shard", "12", "--updates", "12",
    "--positions", "96", "--together", "2", "--depth", "3", "--held-out", "4", "--checkpoint-every", "2",
    "--evaluate-every", "4", "--chunk", "64", "--state-size", "32", "--draft-vocab", "0", "--memory-heads", "2",
    "--memory-size", "8", "--shape", "4x3:7", "--device", "cpu", "--tasks", "0",
]  # fmt: skip
LAST = "checkpoints/update-00000012/state.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", torch.float32, eos_token_id=END).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["train", "--out", str(out), "--model", model, *SMALL]) == 0
    return out


def command(model: str, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "redrafter.cli.main", "train", "--out", str(out), "--model", model, *SMALL, *more]


ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def test_one_command_from_nothing_to_a_drafter(whole: Path, model: str, capsys) -> None:
    assert {p.name for p in whole.iterdir()} >= {
        "data", "config.json", "model.safetensors", "journal.jsonl", "report.html", "run.json", "checkpoints",
    }  # fmt: skip
    assert json.loads((whole / "data" / "manifest.json").read_text())["complete"]
    journal = [json.loads(line) for line in (whole / "journal.jsonl").read_text().splitlines()]
    assert [r["update"] for r in journal if "held_out" in r] == [4, 8, 12]
    assert len(list((whole / "checkpoints").iterdir())) == 2
    assert main(["generate", "--model", model, "--drafter", str(whole), "--max-new-tokens", "8", "hello"]) == 0
    assert main(["train", "--out", str(whole), "--model", model, *SMALL]) == 0  # nothing is left to do
    said = capsys.readouterr().out
    assert "tokens/step simulated" in said
    assert "estimate" not in said, "a run that was begun goes on at once"


def test_minutes_bound_data_and_training(model: str, tmp_path: Path, capsys) -> None:
    """No sizes are given but those of the drafter: all texts and updates would take days."""
    common = ["--model", model, "--device", "cpu"]
    small = SMALL[SMALL.index("--state-size") : SMALL.index("--device")]
    began = time.monotonic()
    assert main(["train", "--out", str(tmp_path), *common, *small, "--depth", "3", "--minutes", "0.35"]) == 0
    assert time.monotonic() - began < 60, "21 seconds, on a busy machine"
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"writing texts for [1-7] s: 4 at once", out), "a third of it, less the loading"
    assert "positions fit into" in out
    assert main(["generate", *common, "--drafter", str(tmp_path), "--max-new-tokens", "8", "hello"]) == 0


def test_minutes_in_which_nothing_is_learned_are_refused(model: str, tmp_path: Path, capsys) -> None:
    small = SMALL[SMALL.index("--state-size") : SMALL.index("--tasks")]
    line = one_line(
        capsys, "--out", str(tmp_path / "no"), "--model", model, *small, "--depth", "3", "--minutes", "0.001"
    )
    assert re.search(r"--minutes 0.001 is too short: .* give --minutes \d+ or more, or go on from .* --init-from", line)
    assert not (tmp_path / "no").exists()


def test_loading_counts_as_time(whole: Path, model: str, tmp_path: Path, monkeypatch) -> None:
    clock = Clock()

    def load(*args: Any, **options: Any) -> Any:
        clock.now += 2
        return load_target(*args, **options)

    def train(*_: Any, seconds: float, **__: Any) -> None:
        raise ConfigError(f"{seconds} s are left")

    monkeypatch.setattr("redrafter.cli.train.time", clock)
    monkeypatch.setattr("redrafter.targets.load_target", load)
    monkeypatch.setattr("redrafter.train.trainer.train", train)
    common = ["--model", model, "--device", "cpu", "--data", str(whole / "data"), "--depth", "3", "--shape", "4x3:7"]
    common += ["--init-from", str(whole)]  # else a hundredth of a minute is refused
    for minutes, least, most in (("1", 56.9, 57), ("0.01", 0, 0)):
        with pytest.raises(ConfigError) as refused:
            main(["--verbose", "train", "--out", str(tmp_path), *common, "--minutes", minutes])
        assert least <= float(str(refused.value).split()[0]) <= most


@pytest.mark.parametrize("when", ["data/texts-00000.safetensors", "checkpoints/update-00000004"])
@pytest.mark.slow
def test_killed_at_any_moment(whole: Path, model: str, tmp_path: Path, when: str) -> None:
    """SIGKILL while data is made, and between two checkpoints: the same command ends in the same bytes."""
    out = tmp_path / "killed"
    process = subprocess.Popen(command(model, out), env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (out / when).exists():
        assert process.poll() is None, process.stderr.read().decode()  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / LAST).exists(), "killed too late to mean anything"
    assert main(["train", "--out", str(out), "--model", model, *SMALL]) == 0
    assert (out / LAST).read_bytes() == (whole / LAST).read_bytes()
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for shard in (whole / "data").glob("texts-*"):
        assert (out / "data" / shard.name).read_bytes() == shard.read_bytes()


@pytest.mark.slow
def test_two_processes(whole: Path, model: str, tmp_path: Path, capsys, monkeypatch) -> None:
    """Twice the positions per update; both see all updates, one writes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    rest = command(model, tmp_path / "two", "--data", str(whole / "data"))[2:]
    done = subprocess.run([*launch, "-m", *rest], env=ENV, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("report.html") == 1
    one = ["train", "--out", str(tmp_path / "one"), "--model", model, *SMALL, "--data", str(whole / "data")]
    assert main([*one, "--positions", "192"]) == 0  # the same rows per update
    a, b, other = (load_file(p / LAST) for p in (tmp_path / "two", tmp_path / "one", whole))
    gaps = [max(float((a[k] - x[k]).abs().mean()) for k in a if k.startswith("net.")) for x in (b, other)]
    assert gaps[0] < 1e-6, gaps
    assert gaps[1] > 1e-4, gaps
    capsys.readouterr()
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = one_line(capsys, "--out", str(tmp_path / "no"), "--model", model, *SMALL)
    assert "several processes need finished data" in line


def one_line(capsys, *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0, error
    return error


def test_bad_input_is_one_line(whole: Path, model: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    out = ["--out", str(tmp_path / "out"), "--model", model, *SMALL]
    assert "holds no questions" in one_line(capsys, *out, "--prompts", str(tmp_path / "empty.jsonl"))
    (tmp_path / "nothing").mkdir()
    assert "manifest" in one_line(capsys, *out, "--data", str(tmp_path / "nothing"))
    other = tmp_path / "other"
    make_model("llama", torch.float32, eos_token_id=END).save_pretrained(other)
    tokenizer("zyxwvutsrqponmlkjihgfedcbaABCDEFGHIJK").save_pretrained(other)
    mismatch = ["--out", str(tmp_path / "o2"), "--model", str(other), *SMALL, "--data", str(whole / "data")]
    assert "tokenizer" in one_line(capsys, *mismatch)
    assert "was begun with train's lr" in one_line(capsys, "--out", str(whole), "--model", model, *SMALL, "--lr", "1")
    assert "leave the other drafter options out" in one_line(capsys, *out, "--init-from", str(whole))
    assert "nan" not in (whole / "journal.jsonl").read_text().lower()
    assert load_target(model).vocab_size == END + 1


def test_many_texts_on_a_cpu_are_warned_of(model: str, tmp_path: Path, capsys, monkeypatch) -> None:
    given = ["distill", "--model", model, "--out", str(tmp_path), "--texts", "4", "--max-new-tokens", "4"]
    for many, warned in ((5, False), (4, True)):
        monkeypatch.setattr("redrafter.cli.distill.MANY", many)
        assert main([*given, "--tasks", "0", "--prompt-tokens", "16", "--device", "cpu"]) == 0
        assert ("4 texts may take days on a CPU: give --texts N" in " ".join(capsys.readouterr().out.split())) == warned


def test_an_estimate_writes_nothing(model: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "no"
    assert main(["train", "--out", str(out), "--model", model, *SMALL, "--estimate"]) == 0
    said = capsys.readouterr().out
    assert [line.split(":")[0].split()[0] for line in said.splitlines()] == [
        "estimate", "data", "training", "disk", "memory", "tokens/step",
    ]  # fmt: skip
    assert not out.exists()
