"""`redrafter quantize` and the dtypes int4 and fp8: the same text from the folder and at load; stopped runs."""

import json

import pytest
import torch
from safetensors.torch import load_file

from redrafter.cli.main import main
from redrafter.errors import ConfigError, RedrafterError
from redrafter.targets import load_target
from redrafter.targets.quantised import write
from redrafter.targets.quantised.files import INDEX
from redrafter.targets.quantised.linear import RoundedLinear
from redrafter.targets.quantised.nearest import Plan
from redrafter.targets.quantised.write import STATE, quantise_folder
from tests.helpers.letters import tokenizer
from tests.helpers.quantised import write_model, write_quantised
from tests.helpers.zoo import make_model
from tests.targets.quantised.test_load import texts

SIZES = {"int4": 64, "fp8": 32}
"""128 divides no size of the model, 64 all inputs of its layers, 32 all outputs too."""


@pytest.fixture
def model(tmp_path):
    """In two files, with a tokenizer and a file of the user's."""
    own = make_model(dtype=torch.float32, hidden_size=64, intermediate_size=192, head_dim=16, tie_word_embeddings=False)
    own.bfloat16().save_pretrained(tmp_path / "model", max_shard_size="100KB")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "LICENSE").write_text("as you like")
    return tmp_path / "model"


def shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_the_folder_gives_the_text_of_the_dtype(scheme, model, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["quantize", str(model), "--to", scheme, "--out", str(out)]) == 0
    assert f"14 layers in {scheme}, groups of {SIZES[scheme]}" in capsys.readouterr().out
    folder, at_load = load_target(out, dtype="fp32"), load_target(model, dtype=scheme, device="cpu")
    whole = load_target(model, dtype="fp32")
    assert texts(folder) == texts(at_load) != texts(whole)
    assert folder.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
    assert (out / "LICENSE").read_text() == "as you like"
    assert {p.name for p in model.iterdir() if p.name != INDEX} <= {p.name for p in out.iterdir()}
    assert (out / "tokenizer_config.json").exists()
    assert shards(out) == shards(model)
    assert len(shards(out)) > 1
    index = json.loads((out / INDEX).read_text())["weight_map"]
    assert index == {name: file for file in shards(out) for name in load_file(out / file)}
    for name, wanted in whole.model.named_parameters():
        made = folder.model.get_parameter(name)
        if name.endswith("_proj.weight"):
            assert 0.005 < float(((made - wanted).norm() / wanted.norm()).detach()) < 0.1
            assert isinstance(folder.model.get_submodule(name.removesuffix(".weight")), RoundedLinear) == (
                scheme == "fp8"
            )
        else:
            assert torch.equal(made, wanted)


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_a_searched_scale_is_better_than_that_of_the_largest_weight(scheme):
    torch.manual_seed(1)
    weight = torch.randn(128, 128) * torch.rand(128, 1)
    weight[0, :32] = 0
    plan = Plan(scheme=scheme, size=32, matrices=frozenset(), ignored=())
    made = plan.weights.dequantise(plan.quantised(weight), (128, 128), torch.float32)
    most = 448.0 if scheme == "fp8" else 7.5
    blocks = weight.unflatten(0, (-1, 32 if scheme == "fp8" else 1)).unflatten(2, (-1, 32))
    scale = blocks.abs().amax((1, 3), keepdim=True) / most
    codes = (blocks / scale.clamp(min=1e-9)).clamp(-most, most)
    codes = codes.to(torch.float8_e4m3fn).float() if scheme == "fp8" else codes.round().clamp(-8, 7)
    plain = (codes * scale).flatten(0, 1).flatten(1)
    assert (made - weight).norm() < 0.98 * (plain - weight).norm()
    assert not made[0, :32].any()


def test_a_stopped_run_goes_on(model, tmp_path, monkeypatch, capsys):
    out, command = tmp_path / "out", ["quantize", str(model), "--to", "int4", "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    whole, written = write._write, []

    def stop(path, tensors):
        if written:
            raise KeyboardInterrupt
        written.append(path)
        whole(path, tensors)

    monkeypatch.setattr(write, "_write", stop)
    assert main([*command, str(out)]) == 130
    assert "to go on from here, give the same command again" in capsys.readouterr().err
    assert shards(out) == [written[0].name]
    assert not (out / "config.json").exists()
    stamp = written[0].stat().st_mtime_ns
    with pytest.raises(ConfigError, match="an unfinished run with another model or scheme"):
        quantise_folder(str(model), out, "fp8")
    monkeypatch.setattr(write, "_write", whole)
    assert main([*command, str(out)]) == 0
    assert written[0].stat().st_mtime_ns == stamp
    made, wanted = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (out, tmp_path / "whole"))
    assert made == wanted
    assert STATE not in made


def test_nothing_is_overwritten(model, tmp_path):
    out = tmp_path / "out"
    quantise_folder(str(model), out, "int4")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    for scheme in ("int4", "fp8"):
        with pytest.raises(ConfigError, match="holds other files; choose another folder"):
            quantise_folder(str(model), out, scheme)
    with pytest.raises(ConfigError, match="own folder"):
        quantise_folder(str(model), model, "int4")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_what_cannot_be_quantised_is_refused(model, tmp_path):
    done = write_quantised(tmp_path / "done", "gptq")
    with pytest.raises(ConfigError, match="quantised already"):
        quantise_folder(str(done), tmp_path / "out", "int4")
    with pytest.raises(ConfigError, match="is quantised already; leave dtype int4 out"):
        load_target(done, dtype="int4")
    odd = write_model(tmp_path / "odd", hidden_size=24, intermediate_size=40)
    with pytest.raises(RedrafterError, match="multiples of 32"):
        quantise_folder(str(odd), tmp_path / "out", "fp8")
    (model / shards(model)[0]).unlink()
    with pytest.raises(RedrafterError, match="has no file"):
        quantise_folder(str(model), tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="not for GGUF files"):
        load_target("some.gguf", dtype="int4", device="cpu")


def test_experts_are_quantised_and_routers_are_not(tmp_path):
    folder = write_model(tmp_path / "model", "qwen3-moe", intermediate_size=64, moe_intermediate_size=64)
    quantise_folder(str(folder), tmp_path / "out", "int4")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight_packed" in names
    assert "model.layers.1.mlp.gate.weight" in names
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    assert texts(load_target(tmp_path / "out", dtype="fp32")) == texts(load_target(folder, dtype="int4", device="cpu"))
