"""Folders of every kind of drafter that hold what no trainer wrote: each is refused in one line, at once."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import redrafter
from redrafter import Shape
from redrafter.drafters import checkpoint
from redrafter.errors import ConfigError, CorruptCheckpoint, ModelNotFound
from redrafter.interop import apple, speculators
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, peer_drafter, recurrent_drafter

KINDS = ("recurrent", "medusa", "eagle", "speculators", "apple")
WITH_TOKEN_IDS = KINDS[:-1]


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(dtype=torch.float32))


def write(folder, kind, target, **changes):
    """A small drafter's folder."""
    if kind == "apple":
        return apple.write(folder, recurrent_drafter(target, first_state="zero").net)
    made = peer_drafter(kind, target, **changes) if kind in ("medusa", "eagle") else None
    net = (made or recurrent_drafter(target, head="tied", **changes)).net
    if net.token_ids is not None:
        net.token_ids.copy_(torch.arange(VOCAB).flip(0)[: len(net.token_ids)])
    if kind == "speculators":
        return speculators.write(folder, net, {}, "some-model", [], depth=3)
    return checkpoint.write(folder, net, target)


def refused(target, folder):
    with pytest.raises(CorruptCheckpoint) as caught:
        redrafter.load(target.model, drafter=str(folder))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert str(folder) in str(caught.value)
    return str(caught.value)


def change(folder, edit):
    """Edit the configuration, a dictionary, in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", WITH_TOKEN_IDS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda ids: ids.index_fill(0, torch.tensor([4]), 10**12),
        lambda ids: ids.index_fill(0, torch.tensor([4]), VOCAB),
        lambda ids: ids.index_fill(0, torch.tensor([4]), -1),
        lambda ids: ids.index_fill(0, torch.tensor([4]), int(ids[0])),
        lambda ids: ids.int(),
        lambda ids: ids.float(),
        lambda ids: ids[:-1].clone(),
        lambda ids: ids[:, None].clone(),
    ],
    ids=["huge", "too large", "negative", "twice", "int32", "floats", "too few", "a matrix"],
)
def test_token_ids_that_are_no_different_tokens(target, tmp_path, kind, damage):
    write(tmp_path, kind, target, draft_vocab_size=9)
    assert redrafter.load(target.model, drafter=str(tmp_path)).generate(PROMPTS[:1], max_new_tokens=2)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"token_ids": damage(tensors["token_ids"])}, tmp_path / "model.safetensors")
    assert "token_ids must be" in refused(target, tmp_path)


@pytest.mark.parametrize("kind", WITH_TOKEN_IDS)
def test_token_ids_come_with_their_number(target, tmp_path, kind):
    write(tmp_path, kind, target, draft_vocab_size=9)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["token_ids"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "one is missing" in refused(target, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "value",
    [10**12, 2**40, 10**400, -1, 1.5, "24", True, None, [1], {}, float("nan")],
    ids=lambda value: str(value)[:8],
)
def test_sizes_of_another_kind_or_of_no_file(target, tmp_path, kind, value):
    write(tmp_path / "whole", kind, target)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    sizes = config if kind == "apple" else config["drafter"]
    optional = {"draft_vocab_size", "rotary_base", "rotary_scale"} if value is None or value == 1.5 else set()
    names = [name for name, size in sizes.items() if type(size) in (int, float) and name not in optional]
    assert len(names) > 3
    for name in names:
        folder = tmp_path / name
        write(folder, kind, target)
        change(folder, lambda c, name=name: (c if kind == "apple" else c["drafter"]).update({name: value}))
        if not (kind == "eagle" and name.startswith("rotary_") and value in (10**12, 2**40)):  # any number
            refused(target, folder)


@pytest.mark.parametrize("kind", WITH_TOKEN_IDS)
@pytest.mark.parametrize("layers", ["x", 5, [1.5], ["x"], None, {}, [[1]], [True], []])
def test_layers_that_are_no_numbers(target, tmp_path, kind, layers):
    write(tmp_path, kind, target)
    change(tmp_path, lambda c: c["drafter"].update(layers=layers))
    refused(target, tmp_path)


@pytest.mark.parametrize("kind", WITH_TOKEN_IDS)
@pytest.mark.parametrize("entry", [[1], "x", {"tokenizer": [1]}, {"weights": 3}, None])
def test_a_target_that_is_no_identity(target, tmp_path, kind, entry):
    write(tmp_path, kind, target)
    change(tmp_path, lambda c: c.update(target=entry))
    assert "target must be" in refused(target, tmp_path)


@pytest.mark.parametrize("kind", WITH_TOKEN_IDS)
@pytest.mark.parametrize("entry", [[1], "x", None, 3, {}, {"unknown": 1}])
def test_a_drafter_that_is_no_description(target, tmp_path, kind, entry):
    write(tmp_path, kind, target)
    change(tmp_path, lambda c: c.update(drafter=entry))
    refused(target, tmp_path)


DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b'{"model_type": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model_type": "redrafter_recurrent", "model_type": "redrafter_medusa"}',
        b'{"model_type": "redrafter_recurrent", "drafter": {"blocks": ' + b"9" * 5000 + b"}}",
        b"\xff\xfe\x00",
        b" " * 2**24 + b"{}",
    ],
    ids=["lists", "objects", "a nested type", "a key twice", "digits", "no text", "16 MiB"],
)
def test_configurations_that_are_no_configuration(target, tmp_path, text):
    write(tmp_path, "recurrent", target)
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises((CorruptCheckpoint, ModelNotFound)) as caught:
        redrafter.load(target.model, drafter=str(tmp_path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda weight: weight.index_fill(0, torch.tensor([1]), torch.nan),
        lambda weight: weight.index_fill(0, torch.tensor([1]), torch.inf),
        lambda weight: weight.double().index_fill(0, torch.tensor([1]), 1e300),
        lambda weight: weight.long(),
        lambda weight: weight.to(torch.int8),
        lambda weight: weight.to(torch.complex64),
        lambda weight: weight[:, :0].clone(),
        lambda weight: weight[0, 0].clone(),
    ],
    ids=["NaN", "infinity", "beyond fp32", "int64", "int8 without scales", "complex", "empty", "a number"],
)
def test_weights_that_are_no_weights(target, tmp_path, kind, damage):
    write(tmp_path, kind, target)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
        save_file(tensors | {name: damage(tensors[name])}, tmp_path / "model.safetensors")
        refused(target, tmp_path)


@pytest.mark.parametrize("kind", ["recurrent", "medusa", "eagle"])
def test_scales_that_belong_to_no_matrix(target, tmp_path, kind):
    net = (recurrent_drafter(target) if kind == "recurrent" else peer_drafter(kind, target)).net
    checkpoint.write(tmp_path, net, target, storage="int8")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".scale"))
    for scale in (torch.ones(10**6), torch.ones(1), tensors[name][None], torch.full_like(tensors[name], torch.nan)):
        save_file(tensors | {name: scale.clone()}, tmp_path / "model.safetensors")
        refused(target, tmp_path)
    weight = name.removesuffix(".scale")
    save_file(tensors | {weight: tensors[weight].float()}, tmp_path / "model.safetensors")
    refused(target, tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_in_place_of_a_file(target, tmp_path, file):
    write(tmp_path, "recurrent", target)
    (tmp_path / file).unlink()
    (tmp_path / file).mkdir()
    assert "it is no file" in refused(target, tmp_path)


@pytest.mark.parametrize("header", [b"{}", b"[" * 1000, b'{"head.weight": 3}', b"\xff" * 40])
def test_headers_of_the_weights(target, tmp_path, header):
    write(tmp_path, "recurrent", target)
    for size in (len(header), 2**63, 10**8, 0):
        (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + header)
        refused(target, tmp_path)


def test_a_network_larger_than_its_file_is_not_made(target, tmp_path):
    write(tmp_path, "recurrent", target)
    change(tmp_path, lambda c: c["drafter"].update(exit_size=2**20, blocks=1024))
    assert "describes more weights than its files hold" in refused(target, tmp_path)


def causal(folder):
    """A smaller model of the same vocabulary."""
    model = copy.deepcopy(make_model(dtype=torch.float32))
    model.save_pretrained(folder)
    return folder


def test_a_causal_lm_larger_than_its_file(target, tmp_path):
    engine = redrafter.load(target.model, drafter=str(causal(tmp_path)), shape=Shape(width=2, length=2))
    assert engine.generate(PROMPTS[:1], max_new_tokens=2)
    for name, value in {
        "num_hidden_layers": 10**12, "hidden_size": 10**12, "intermediate_size": 10**9, "vocab_size": 10**11,
    }.items():  # fmt: skip
        causal(tmp_path)
        change(tmp_path, lambda c, name=name, value=value: c.update({name: value}))
        refused(target, tmp_path)


RAN = "ran.txt"


def test_code_of_a_folder_runs_only_on_request(target, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    causal(folder)
    monkeypatch.chdir(tmp_path)
    code = f"open({str(tmp_path / RAN)!r}, 'w').close()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
    code += "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    code += "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    (folder / "own.py").write_text(code)
    mapped = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    change(folder, lambda c: c.update(model_type="own", auto_map=mapped))

    def asked(*_):
        raise AssertionError("it must not ask")

    monkeypatch.setattr("builtins.input", asked)
    for name in (str(folder), f"{folder}+ngram"):
        with pytest.raises(ConfigError, match="trust_remote_code=True if you trust this code") as caught:
            redrafter.load(target.model, drafter=name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="trust_remote_code=True"):
        load_target(str(folder))
    assert not (tmp_path / RAN).exists()
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = causal(tmp_path / "target")
    redrafter.load(str(own), drafter=str(folder), trust_remote_code=True, dtype="fp32", device="cpu")
    assert (tmp_path / RAN).exists(), "twin: it runs where the user trusts it"
