"""Drafters in other projects' formats: written, read back, the same guesses; what has no place there is refused."""

import json
from dataclasses import replace

import pytest
import torch

import redrafter
from benchmarks.formats import difference
from redrafter import Engine, Shape
from redrafter.cli.main import main
from redrafter.core.accept import Accepted
from redrafter.drafters import RecurrentDrafter, checkpoint, shipped
from redrafter.drafters.load import bind
from redrafter.drafters.options import DrafterOptions
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch
from redrafter.interop import conventions, export, folders, published
from redrafter.interop.conventions import Follow
from redrafter.targets import load_target
from redrafter.targets.default import NAME
from redrafter.texts import Texts
from redrafter.train.trainer import train
from tests.helpers.toys import CONFIG
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, peer_drafter, recurrent_drafter

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


def export_command(drafter, out, *options: str) -> int:
    return main(["export", str(drafter), "--out", str(out), *options])


@pytest.mark.parametrize(
    ("to", "changes"), [("speculators", OURS), ("speculators", {}), ("apple", {"first_state": "zero"})]
)
def test_round_trip(target, model, tmp_path, capsys, to, changes):
    drafter = saved(target, tmp_path / "ours", **changes)
    named = ["--model", str(model)] if to == "speculators" else []
    assert export_command(tmp_path / "ours", tmp_path / "theirs", "--to", to, *named) == 0
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
        export_command(
            tmp_path / "ours", tmp_path / "out", "--to", "speculators", "--model", str(model), "--depth", "5"
        )
        == 0
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
    assert export_command(shipped.FOLDER / NAME, tmp_path / "out", "--to", "speculators") == 0
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
        ([model, tmp_path / "a", "--to", "apple"], "is not a recurrent drafter, nor an eagle3 or block one"),
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
        assert export_command(*options) == 2
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 1
        assert message in err[0]
    assert not (tmp_path / "a" / "config.json").exists()


def test_other_kinds_and_other_targets_are_refused(target, model, tmp_path):
    saved(target, tmp_path / "ours")
    export_command(tmp_path / "ours", tmp_path / "out", "--to", "speculators", "--model", str(model))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"speculators_model_type": "mlp"}))
    with pytest.raises(CorruptCheckpoint, match="speculators_model_type is 'mlp'"):
        redrafter.load(target.model, drafter=str(tmp_path / "out"))
    path.write_text(json.dumps(config | {"drafter": config["drafter"] | {"vocab_size": 41}}))
    with pytest.raises((CorruptCheckpoint, DrafterMismatch)):
        redrafter.load(target.model, drafter=str(tmp_path / "out"))


PUBLISHED = {
    "eagle3": ("eagle3", {"blocks": 2, "draft_vocab": 20}),
    "block": ("dflash", {"guesses": 4}),
    "causal block": ("dflash", {"guesses": 4, "causal": True, "draft_vocab": 20}),
    "block with a Markov head": ("dflash", {"guesses": 4, "markov": "gated", "draft_vocab": 20, "head": "own"}),
}


@pytest.fixture(scope="module")
def deep():
    return load_target(make_model(dtype=torch.float32, num_hidden_layers=8, layer_types=None))


def untrained(name: str, target):
    drafter = peer_drafter("block" if "block" in name else name, target, **PUBLISHED[name][1])
    if drafter.net.token_ids is not None:  # in an order of frequency, as training has them
        drafter.net.token_ids.copy_(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:20])
        drafter = bind(drafter.net, target)
    return drafter


@torch.no_grad()
def guesses(drafter, target) -> torch.Tensor:
    """(3, V') logits along a text, in the order of the tokens."""
    tokens, one = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), torch.tensor([1])
    hidden = target.states(tokens, drafter.layers)
    state = drafter.begin(tokens[:, :4], 4 * one, hidden[:, :4], 16)
    new = tokens[:, 4:5]
    state = drafter.advance(state, Accepted(0 * new, new, one, 0 * one, 0 * one), hidden[:, 3:4])
    search = Follow(tokens[:, 5:])
    drafter.draft(state, tokens[:, 4], search)
    order = slice(None) if search.token_ids is None else search.token_ids.argsort()
    return torch.cat(search.logits)[:, order]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("contained", [False, True], ids=["own layout", "speculators"])
def test_what_is_exported_guesses_the_same(name, contained, deep, tmp_path):
    drafter, to = untrained(name, deep), "speculators" if contained else PUBLISHED[name][0]
    if contained and drafter.net.config.kind == "block" and drafter.net.config.causal:
        with pytest.raises(ConfigError, match="no place for a causal block: use dflash"):
            export.write(tmp_path, drafter.net, deep, to, [], 3)
        return
    export.write(tmp_path, drafter.net, deep, to, ["LlamaForCausalLM"], 3)
    found = published.read(tmp_path, deep)
    found.net.config = found.readings[0].config
    again = bind(found.net, deep)
    ours, theirs = guesses(drafter, deep), guesses(again, deep)
    assert difference(theirs, ours) < 1e-6
    assert difference(theirs.roll(1, -1), ours) > 0.1
    shape, how = Shape(width=3, length=3), {"max_new_tokens": 10, "temperature": 1.0, "seed": 1}
    first, second = (Engine(deep, each, shape=shape).generate(PROMPTS[:3], **how) for each in (drafter, again))
    assert [c.stats.accepted_per_step for c in first] == [c.stats.accepted_per_step for c in second]


def test_the_command_exports_to_a_published_layout(deep, tmp_path, capsys):
    deep.model.save_pretrained(tmp_path / "model")
    net = untrained("eagle3", deep).net
    checkpoint.write(tmp_path / "ours", net, deep)
    model = ["--model", str(tmp_path / "model")]
    assert export_command(tmp_path / "ours", tmp_path / "out", "--to", "speculators", "--depth", "5", *model) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    capsys.readouterr()
    for to, message in (("dflash", "is exported to eagle3 or speculators, not to dflash"), ("apple", "not to apple")):
        assert export_command(tmp_path / "ours", tmp_path / "no", "--to", to, *model) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert message in line
    assert not (tmp_path / "no").exists()


def test_what_a_layout_has_no_place_for_is_refused(deep, tmp_path):
    last = peer_drafter("eagle3", deep, layers=(2, -1)).net
    with pytest.raises(ConfigError, match="last hidden state, which is normalised"):
        export.write(tmp_path, last, deep, "eagle3", [], 3)
    turned = peer_drafter("eagle3", deep).net
    turned.config = replace(turned.config, frequencies=(1.0, 0.5))
    with pytest.raises(ConfigError, match="no place for frequencies"):
        export.write(tmp_path, turned, deep, "eagle3", [], 3)
    assert not list(tmp_path.iterdir())


def test_training_goes_on_from_a_published_drafter(deep, tmp_path):
    """A layout that leaves a convention open: it is measured, and what was learned is kept."""
    text, prompt = conventions._written(deep)
    texts = Texts.of([text] * 4, [prompt] * 4, [0.0] * 4, [0] * 4)
    config = replace(CONFIG, updates=40, evaluate_every=40, held_out=1, positions=48)
    options = DrafterOptions(drafter="eagle3", exit_size=48, draft_vocab=30)
    before = train(deep, texts, tmp_path / "ours", options=options, config=config)
    net, _ = checkpoint.read(tmp_path / "ours")
    export.write(tmp_path / "published", net, deep, "eagle3", ["LlamaForCausalLM"], 3)
    assert len(published.read(tmp_path / "published", deep).readings) > 1
    config = replace(config, updates=1, lr=1e-9, warmup=0)
    after = train(deep, texts, tmp_path / "tuned", config=config, init_from=tmp_path / "published")
    assert after.tokens_per_step == pytest.approx(before.tokens_per_step, abs=1e-6)
    tuned, _ = checkpoint.read(tmp_path / "tuned")
    assert difference(guesses(bind(tuned, deep), deep), guesses(bind(net, deep), deep)) < 1e-4
