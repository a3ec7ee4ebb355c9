"""Drafters in other projects' formats: written, read back, the same guesses; what has no place there is refused."""

import json

import pytest
import torch

import redrafter
from redrafter import Engine, Shape
from redrafter.cli.main import main
from redrafter.drafters import RecurrentDrafter, shipped
from redrafter.errors import CorruptCheckpoint, DrafterMismatch
from redrafter.interop import folders
from redrafter.targets import load_target
from redrafter.targets.default import NAME
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter

OURS = {"head": "tied", "draft_vocab_size": 9, "layers": (1, -1), "context_size": 64, "memory_heads": 2}


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(dtype=torch.float32))


@pytest.fixture
def model(target, tmp_path):
    target.model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def saved(target, folder, **changes) -> RecurrentDrafter:
    drafter = recurrent_drafter(target, **changes)
    drafter.save(folder, target)
    return drafter


def export(drafter, out, *options: str) -> int:
    return main(["export", str(drafter), "--out", str(out), *options])


@pytest.mark.parametrize(
    ("to", "changes"), [("speculators", OURS), ("speculators", {}), ("apple", {"first_state": "zero"})]
)
def test_round_trip(target, model, tmp_path, capsys, to, changes):
    drafter = saved(target, tmp_path / "ours", **changes)
    named = ["--model", str(model)] if to == "speculators" else []
    assert export(tmp_path / "ours", tmp_path / "theirs", "--to", to, *named) == 0
    assert f"for {to}" in capsys.readouterr().out
    again = redrafter.load(target.model, drafter=str(tmp_path / "theirs"), shape=Shape(width=3, length=3))
    assert isinstance(again.drafter, RecurrentDrafter)
    assert again.drafter.net.config == drafter.net.config
    for name, weight in drafter.net.state_dict().items():
        torch.testing.assert_close(again.drafter.net.state_dict()[name], weight, rtol=0, atol=0)
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    first = Engine(target, drafter, shape=Shape(width=3, length=3)).generate(PROMPTS, **options)
    assert [c.stats.steps for c in first] == [c.stats.steps for c in again.generate(PROMPTS, **options)]


def test_the_conventions_of_speculators(target, model, tmp_path):
    saved(target, tmp_path / "ours", **OURS)
    assert (
        export(tmp_path / "ours", tmp_path / "out", "--to", "speculators", "--model", str(model), "--depth", "5") == 0
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "redrafter"
    assert config["speculators_version"] == "0.9.0"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1]
    assert config["speculators_config"] == {
        "algorithm": "redrafter",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": str(model), "architectures": ["LlamaForCausalLM"]},
    }
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_shipped_drafter_needs_no_model_named(tmp_path):
    assert export(shipped.FOLDER / NAME, tmp_path / "out", "--to", "speculators") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {"name_or_path": NAME, "architectures": ["LlamaForCausalLM"]}
    net, made_for = folders.read(tmp_path / "out")
    original, known = folders.read(shipped.FOLDER / NAME)
    assert made_for == known
    torch.testing.assert_close(net.state_dict(), original.state_dict(), rtol=0, atol=0)


def test_refusals(target, model, tmp_path, capsys):
    """One line and exit code 2 each."""
    saved(target, tmp_path / "ours", **OURS)
    for options, message in (
        ([tmp_path / "nowhere", tmp_path / "a", "--to", "apple"], "no drafter"),
        ([model, tmp_path / "a", "--to", "apple"], "is not a recurrent drafter"),
        ([tmp_path / "ours", tmp_path / "a", "--to", "apple"], "has no place for"),
        ([tmp_path / "ours", tmp_path / "a", "--to", "speculators"], "give that model with --model"),
        (
            [tmp_path / "ours", tmp_path / "a", "--to", "speculators", "--model", "./none"],
            "cannot read the configuration",
        ),
        (
            [tmp_path / "ours", tmp_path / "a", "--to", "speculators", "--model", str(model), "--depth", "0"],
            "at least 1",
        ),
        ([tmp_path / "ours", model, "--to", "speculators", "--model", str(model)], "already holds"),
    ):
        assert export(*options) == 2
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 1
        assert message in err[0]
    assert not (tmp_path / "a" / "config.json").exists()


def test_other_kinds_and_other_targets_are_refused(target, model, tmp_path):
    saved(target, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "out", "--to", "speculators", "--model", str(model))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"speculators_model_type": "mlp"}))
    with pytest.raises(CorruptCheckpoint, match="speculators_model_type is 'mlp'"):
        redrafter.load(target.model, drafter=str(tmp_path / "out"))
    path.write_text(json.dumps(config | {"drafter": config["drafter"] | {"vocab_size": 41}}))
    with pytest.raises((CorruptCheckpoint, DrafterMismatch)):
        redrafter.load(target.model, drafter=str(tmp_path / "out"))
