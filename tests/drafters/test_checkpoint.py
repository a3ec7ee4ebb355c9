"""Drafters on disk: ours, Apple's, and everything that can be wrong with them."""

import copy
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import redrafter
from redrafter import Engine, RecurrentConfig, Shape
from redrafter.drafters import RecurrentDrafter, RecurrentNet
from redrafter.drafters.checkpoint import identity
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch, ModelNotFound
from redrafter.interop import apple
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


@pytest.mark.parametrize(
    "changes",
    [{}, {"head": "tied", "draft_vocab_size": 9}, {"first_state": "context", "layers": (0, -1), "context_size": 64}],
)
def test_round_trip(target, tmp_path, changes):
    drafter = recurrent_drafter(target, **changes)
    drafter.save(tmp_path, target)
    again = redrafter.load(target.model, drafter=str(tmp_path), shape=Shape(width=3, length=3))
    assert isinstance(again.drafter, RecurrentDrafter)
    assert again.drafter.net.config == drafter.net.config
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    first = Engine(target, drafter, shape=Shape(width=3, length=3)).generate(PROMPTS, **options)
    second = again.generate(PROMPTS, **options)
    assert [c.stats.steps for c in first] == [c.stats.steps for c in second]


def test_nothing_is_overwritten_without_asking(target, tmp_path):
    target.model.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    drafter = recurrent_drafter(target)
    with pytest.raises(ConfigError, match=r"already holds config.json and model.safetensors"):
        drafter.save(tmp_path, target)
    with pytest.raises(ConfigError, match="already holds"):
        apple.write(tmp_path, recurrent_drafter(target, first_state="zero").net)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    drafter.save(tmp_path / "new", target)
    drafter.save(tmp_path / "new", target, overwrite=True)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]


def test_the_callers_network_stays_as_it_is(target):
    net = RecurrentNet(recurrent_drafter(target).net.config)
    assert net.training
    drafter = RecurrentDrafter(net, target)
    assert drafter.net is not net
    assert net.training
    assert net.head.weight.dtype == torch.float32
    assert drafter.net.head.weight.dtype == torch.float64


def test_identity_does_not_depend_on_the_dtype(tmp_path, caplog):
    single = load_target(make_model(dtype=torch.float32))
    recurrent_drafter(single).save(tmp_path, single)
    low = copy.deepcopy(make_model(dtype=torch.float32)).bfloat16()
    with caplog.at_level(logging.WARNING, logger="redrafter"):
        redrafter.load(low, drafter=str(tmp_path))
    assert not caplog.text


def test_other_weights_only_warn(target, tmp_path, caplog):
    recurrent_drafter(target).save(tmp_path, target)
    tuned = make_model("llama", rms_norm_eps=1e-5)
    with torch.no_grad():
        weight = tuned.lm_head.weight
        weight.add_(0.01 * weight.std() * torch.randn_like(weight))
    with caplog.at_level(logging.WARNING, logger="redrafter"):
        redrafter.load(tuned, drafter=str(tmp_path))
    assert "other weights: the text stays exact" in caplog.text
    caplog.clear()
    redrafter.load(target.model, drafter=str(tmp_path))
    assert not caplog.text


def test_other_shape_names_both_sides(target, tmp_path):
    recurrent_drafter(target).save(tmp_path, target)
    wider = make_model("llama", hidden_size=64)
    with pytest.raises(DrafterMismatch, match=r"a context of 32, but the target .* has 64"):
        redrafter.load(wider, drafter=str(tmp_path))
    other = make_model("llama", vocab_size=VOCAB + 1)
    with pytest.raises(DrafterMismatch, match=rf"a vocabulary of {VOCAB}, but the target .* has {VOCAB + 1}"):
        redrafter.load(other, drafter=str(tmp_path))


class Words:
    def __init__(self, first: str) -> None:
        self.first = first

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.first}{i}": i for i in range(VOCAB)}


def test_other_tokenizer_names_both_sides(target, tmp_path):
    own = load_target(target.model, tokenizer=Words("a"))
    recurrent_drafter(own).save(tmp_path, own)
    redrafter.load(target.model, drafter=str(tmp_path), tokenizer=Words("a"))
    with pytest.raises(DrafterMismatch, match=r"was made for the tokenizer of llama .* has another"):
        redrafter.load(target.model, drafter=str(tmp_path), tokenizer=Words("b"))


class Growing(Words):
    """Counts how often its vocabulary is asked for."""

    size, asked = VOCAB, 0

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        self.asked += 1
        return {f"{self.first}{i}": i for i in range(self.size)}


def test_a_vocabulary_is_hashed_again_only_when_it_grows(target):
    words = Growing("a")
    own = load_target(target.model, tokenizer=words)
    first = [identity(own) for _ in range(3)][-1]
    assert words.asked == 1
    words.size += 1
    assert identity(own)["tokenizer"] != first["tokenizer"], "twin: a token was added"
    assert words.asked == 2


def damage(folder, how):
    config, weights = folder / "config.json", folder / "model.safetensors"
    match how:
        case "no weights":
            weights.unlink()
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:200])
        case "no config":
            config.unlink()
        case "cut config":
            config.write_text(config.read_text()[:40])
        case "config is a list":
            config.write_text("[]")
        case "missing tensor":
            tensors = load_file(weights)
            del tensors["head.weight"]
            save_file(tensors, weights)
        case "wrong shape":
            data = json.loads(config.read_text())
            data["drafter"]["exit_size"] = 25
            config.write_text(json.dumps(data))
        case "impossible shape":
            data = json.loads(config.read_text())
            data["drafter"]["blocks"] = -2
            config.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "how",
    [
        "no weights", "cut weights", "no config", "cut config", "config is a list", "missing tensor", "wrong shape",
        "impossible shape",
    ],
)  # fmt: skip
def test_corrupt(target, tmp_path, how):
    recurrent_drafter(target).save(tmp_path, target)
    damage(tmp_path, how)
    with pytest.raises(CorruptCheckpoint) as caught:
        redrafter.load(target.model, drafter=str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_no_such_drafter(target, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="no drafter 'nobody/nothing'"):
        redrafter.load(target.model, drafter="nobody/nothing")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelNotFound, match="is a file; give the folder"):
        redrafter.load(target.model, drafter=str(file))


def apple_forward(tensors, config, last, h, e_last, e_next):
    """Their drafter, from its description: s0 = 0, s = silu(W e + U s + b), input [h, s], x + silu(linear(x))."""

    def cell(s, e):
        if not config["rnn"]:
            return e + s
        return F.silu(e @ tensors["rnn_w.weight"].T + s @ tensors["rnn_u.weight"].T + tensors["rnn_u.bias"])

    out = []
    state = torch.zeros_like(e_last)
    for embedding in (e_last, e_next):
        state = cell(state, embedding)
        x = torch.cat([h, state], -1)
        if "input_proj.weight" in tensors:
            x = x @ tensors["input_proj.weight"].T + tensors["input_proj.bias"]
        for i in range(config["num_draft_layers"]):
            x = x + F.silu(x @ tensors[f"lm_head.{i}.linear.weight"].T + tensors[f"lm_head.{i}.linear.bias"])
        out.append(x @ tensors[f"lm_head.{config['num_draft_layers']}.weight"].T)
    return out


def apple_folder(folder, hidden, exit_dim, layers, rnn):
    torch.manual_seed(3)
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "exit_dim": exit_dim,
        "num_draft_layers": layers,
        "rnn": rnn,
    }
    tensors = {f"lm_head.{layers}.weight": torch.randn(VOCAB, exit_dim)}
    for i in range(layers):
        tensors[f"lm_head.{i}.linear.weight"] = torch.randn(exit_dim, exit_dim)
        tensors[f"lm_head.{i}.linear.bias"] = torch.randn(exit_dim)
    if rnn:
        tensors["rnn_u.weight"], tensors["rnn_u.bias"] = torch.randn(hidden, hidden), torch.randn(hidden)
        tensors["rnn_w.weight"] = torch.randn(hidden, hidden)
    if exit_dim != 2 * hidden:
        tensors["input_proj.weight"], tensors["input_proj.bias"] = (
            torch.randn(exit_dim, 2 * hidden),
            torch.randn(exit_dim),
        )
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, config


@pytest.mark.parametrize("rnn", [True, False])
@pytest.mark.parametrize("exit_dim", [64, 24])
def test_apple_gives_their_logits_and_goes_back_unchanged(tmp_path, target, exit_dim, rnn):
    tensors, config = apple_folder(tmp_path / "apple", 32, exit_dim, layers=2, rnn=rnn)
    net = apple.read(tmp_path / "apple")
    h, e_last, e_next = torch.randn(3, 4, 32)
    state = net.first_state(e_last, h)
    ours = [net.head(net.features(s, net.share(h))) for s in (state, net.next_state(state, net.token_input(e_next)))]
    for own, expected in zip(ours, apple_forward(tensors, config, None, h, e_last, e_next), strict=True):
        assert torch.allclose(own, expected, rtol=1e-4, atol=1e-3)
    apple.write(tmp_path / "back", net)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k], tensors[k]) for k in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    engine = redrafter.load(target.model, drafter=str(tmp_path / "apple"), shape=Shape(width=3, length=2))
    plain = engine.plain().generate(PROMPTS, max_new_tokens=8)
    assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=8)] == [c.tokens for c in plain]


@pytest.mark.parametrize(
    ("changes", "what"),
    [({}, "a first state from 'embedding'"), ({"first_state": "zero", "head": "tied"}, "a tied head")],
)
def test_apple_refuses_what_their_format_cannot_hold(tmp_path, changes, what):
    shape = {"vocab_size": 9, "context_size": 4, "embedding_size": 4, "state_size": 4, "exit_size": 8}
    with pytest.raises(ConfigError, match=what):
        apple.write(tmp_path, RecurrentNet(RecurrentConfig(**(shape | changes))))


def test_apple_corrupt(tmp_path, target):
    apple_folder(tmp_path, 32, 64, 1, True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["exit_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptCheckpoint, match="exit_dim"):
        redrafter.load(target.model, drafter=str(tmp_path))
