"""The scripts of `examples/` run, with tiny models, and say what they promise."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_drafters import LAYERS
from redrafter.core.cache import tree_visibility
from redrafter.targets import load_target
from tests.cli.test_train import SMALL
from tests.helpers.bytes import byte_target
from tests.helpers.letters import END, tokenizer
from tests.helpers.published import train_published
from tests.helpers.serving import make_served, running
from tests.helpers.zoo import make_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def save_letters(folder: Path, **changes) -> str:
    """A tiny model that writes letters, with its tokenizer."""
    make_model("llama", torch.float32, eos_token_id=END, **changes).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_speculate_writes_the_models_text_in_fewer_passes(capsys, monkeypatch) -> None:
    said = run("speculate.py", capsys, monkeypatch)
    for passes, fewer in re.findall(r"(\d+) passes one letter at a time, (\d+) with guesses", said):
        assert int(passes) == 120
        assert int(fewer) < 60
    assert said.count("temperature") == 2
    assert len((EXAMPLES / "speculate.py").read_text().splitlines()) <= 80, "short enough to be read at once"


def test_twin_nodes_that_see_other_branches_write_another_text(monkeypatch) -> None:
    names = runpy.run_path(str(EXAMPLES / "speculate.py"))
    write, shape = names["write"], names["Shape"](width=4, length=4, nodes=12)
    plain, _ = write("hello", None, 1.0, seed=7)
    assert write("hello", shape, 1.0, seed=7)[0] == plain

    def all_nodes(lengths, mask, slots):
        return tree_visibility(lengths, torch.ones_like(mask), slots)

    monkeypatch.setitem(write.__globals__, "tree_visibility", all_nodes)
    assert write("hello", shape, 1.0, seed=7)[0] != plain


def test_openai_client(capsys, monkeypatch) -> None:
    with running(make_served()) as url:
        said = run("openai_client.py", capsys, monkeypatch, url)
    assert re.search(r"\w+\n\n[1-9]\.\d\d tokens per pass", said)


def test_transformers_generate(capsys, monkeypatch, tmp_path) -> None:
    said = run("transformers_generate.py", capsys, monkeypatch, save_letters(tmp_path))
    assert said.endswith("the same text as without redrafter: True\n")


def test_structured(capsys, monkeypatch, tmp_path) -> None:
    target = byte_target()
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    person, answer, speed = run("structured.py", capsys, monkeypatch, str(tmp_path)).splitlines()
    assert json.loads(person.replace("'", '"')).keys() == {"name", "job", "age"}
    assert answer in ("yes", "no")
    assert float(speed.split()[0]) > 1


def test_published_drafter(capsys, monkeypatch, tmp_path) -> None:
    model = save_letters(tmp_path / "model", num_hidden_layers=LAYERS, layer_types=None)
    drafter = train_published(load_target(model), tmp_path / "before", tmp_path / "drafter")
    said = run("published_drafter.py", capsys, monkeypatch, model, str(drafter))
    assert said.endswith("the same text as without a drafter: True\n")
    assert re.search(r"\d\.\d\d tokens per pass of the model; eagle3\n", said)


@pytest.mark.slow
def test_train_and_serve(tmp_path) -> None:
    """Five processes: data and training, a comparison, a server, two clients."""
    model, commands = save_letters(tmp_path / "model"), tmp_path / "bin"
    commands.mkdir()
    command = commands / "redrafter"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m redrafter.cli.main "$@"\n')
    command.chmod(0o755)
    more = {"PATH": f"{commands}:{os.environ['PATH']}", "ONCE": "1", "PORT": "18317"}
    script, out = EXAMPLES / "train_and_serve.sh", tmp_path / "out"
    done = subprocess.run(
        ["sh", str(script), model, str(out), *SMALL], env=os.environ | more, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tokens/step simulated" in done.stdout
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["choices"][0]["text"]
