"""The MTP module of a target's own checkpoint: texts are exact, what it is is measured, what does not fit is named."""

import json
import logging
import random

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import redrafter
from benchmarks.formats import GOLDEN, TOLERANCE, difference, drafted
from benchmarks.tiny_drafters import MODULES
from redrafter import Engine, RuleConfig, Shape
from redrafter.cli.main import main
from redrafter.drafters import NgramDrafter, NoDrafter, WithNgrams
from redrafter.drafters.decoder import attend_causally
from redrafter.drafters.eagle.target_layer import TargetLayer
from redrafter.drafters.load import bind
from redrafter.errors import CorruptCheckpoint, DrafterMismatch, ModelNotFound, RedrafterError, UnsupportedDrafter
from redrafter.interop import conventions, mtp
from redrafter.targets import load_target, verdicts
from tests.fuzz.drafter_folders import damaged_config, damaged_weights
from tests.helpers.mtp import LAYERS, change, write
from tests.helpers.zoo import PROMPTS, make_model

HOT = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3}
SHAPE = Shape(width=3, length=4, nodes=9)
LAST = f"model.layers.{LAYERS}."
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write("glm-4.5", tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder), dtype="fp32", device="cpu")


def drafter_of(target, folder, reading=0):
    found = mtp.read(folder, target)
    found.net.config = found.readings[reading].config
    return bind(found.net, target)


@pytest.mark.parametrize(
    "kind",
    ["deepseek-v3", "qwen3.5", *(pytest.param(k, marks=slow) for k in ("glm-4.5", "qwen3-next", "qwen3.5-moe"))],
)
def test_texts_are_those_of_plain_decoding(kind, tmp_path):
    """Latent attention; a hybrid with gated attention; grouped keys and experts."""
    target = load_target(str(write(kind, tmp_path)), dtype="fp32", device="cpu")
    plain, alone = Engine(target, NoDrafter()), drafter_of(target, tmp_path)
    for drafter, how in ((alone, {}), (alone, HOT), (WithNgrams(alone), HOT)):
        done = Engine(target, drafter, shape=SHAPE).generate(PROMPTS, max_new_tokens=12, batch_size=3, **how)
        assert [c.tokens for c in done] == [c.tokens for c in plain.generate(PROMPTS, max_new_tokens=12, **how)]
        assert sum(c.stats.nodes for c in done) > 0
        if how:
            assert sum(c.stats.accepted for c in done) > 3, "else no guess was right"


def test_a_users_model_in_fp64(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the fused ones have no fp64
    target = load_target(model)
    done = Engine(target, drafter_of(target, mtp.folder_of(target)), shape=SHAPE).generate(
        PROMPTS[:2], max_new_tokens=8
    )
    assert sum(c.stats.nodes for c in done) > 0


def test_its_steps_are_not_recorded(target, folder, caplog):
    """Experts wait for the host, which no recording can."""
    engine = Engine(target, drafter_of(target, folder), shape=SHAPE, runtime="graphs")
    engine.recorded = True
    done = engine.generate(PROMPTS[:2], max_new_tokens=8, **HOT)
    assert [c.tokens for c in done] == [
        c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS[:2], max_new_tokens=8, **HOT)
    ]
    assert "the drafter has a KV cache or layers of its own" in caplog.text


def test_twin_another_rule_of_acceptance_is_another_text(target, folder):
    lossy = Engine(target, drafter_of(target, folder), shape=SHAPE, rule=RuleConfig(name="typical"))
    plain = Engine(target, NoDrafter())
    done = [engine.generate(PROMPTS, max_new_tokens=12, **HOT) for engine in (lossy, plain)]
    assert [c.tokens for c in done[0]] != [c.tokens for c in done[1]]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("changed", ["norm.weight", "rms_norm_eps"])
def test_twin_another_module_is_another_output(name, changed, tmp_path):
    golden = torch.tensor(json.loads(GOLDEN.read_text())[name]["logits"])
    made = MODULES[name]()
    if changed == "rms_norm_eps":
        made.config["rms_norm_eps"] = 0.1
    else:
        norm = next(k for k in made.tensors if k.endswith((".shared_head.norm.weight", "mtp.norm.weight")))
        made.tensors[norm] = made.tensors[norm] + 1  # as if norms were read as the other layout stores them
    assert difference(drafted(made.write(tmp_path)), golden) > 10 * TOLERANCE


def test_every_convention_is_another_drafter(target, folder):
    found = mtp.read(folder, target)
    assert len(found.readings) == 4
    text, first = conventions._written(target)
    drafter = conventions.bind_own(found.net, target)
    each = {conventions._agreement(drafter, r.config, target, text, first).likely for r in found.readings}
    assert len(each) == 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint whose module has learned the text that the target writes at load."""
    folder = write("glm-4.5", tmp_path_factory.mktemp("trained"))
    target = load_target(str(folder), dtype="fp32", device="cpu")
    found = mtp.read(folder, target)
    net = found.net
    text, _ = conventions._written(target)
    tokens = torch.tensor([text])
    with torch.no_grad():
        states = target.states(tokens, (-1,))[:, :-2]
    places = torch.arange(states.shape[1])[None]
    optimiser = torch.optim.Adam([net.fuse.weight, net.norm.weight], lr=2e-2)
    for _ in range(80):
        out = net.run(states, target.input_embedding(tokens[:, 1:-1]), places, lambda _, *qkv: attend_causally(*qkv))
        loss = F.cross_entropy(target.output_embedding(net.for_head(out))[0], tokens[0, 2:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    learned = {"eh_proj.weight": net.fuse.weight, "shared_head.norm.weight": net.norm.weight}
    change(folder, lambda tensors: tensors | {LAST + name: x.detach().clone() for name, x in learned.items()})
    return folder


@pytest.mark.parametrize("name", ["auto", "mtp", "mtp+ngram"])
def test_the_name_finds_the_module(name, trained, caplog):
    verdicts.forget()
    with caplog.at_level(logging.INFO, "redrafter.interop.conventions"):
        engine = redrafter.load(str(trained), drafter=name, dtype="fp32", device="cpu", shape=SHAPE)
    assert isinstance(engine.drafter, WithNgrams) == (name != "mtp")
    assert "MTP in the layout of DeepSeek and GLM" in getattr(engine.drafter, "inner", engine.drafter).about
    assert "recycled state, first embedding" in caplog.text
    done = engine.generate(PROMPTS, max_new_tokens=12)
    assert [c.tokens for c in done] == [c.tokens for c in engine.plain().generate(PROMPTS, max_new_tokens=12)]


def test_doctor_says_what_it_is(trained, capsys):
    assert main(["doctor", "--model", str(trained), "--drafter", "mtp", "--dtype", "fp32", "--device", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "drafter mtp, W=" in out
    assert "MTP in the layout of DeepSeek and GLM: " in out
    assert "guesses among all of 40 tokens" in out


def test_auto_copies_alone_where_the_module_knows_nothing(folder, caplog):
    verdicts.forget()
    engine = redrafter.load(str(folder), dtype="fp32", device="cpu")
    assert isinstance(engine.drafter, NgramDrafter)
    assert (
        "is drafted for with n-grams alone: the drafter (MTP in the layout of DeepSeek and GLM) guesses" in caplog.text
    )
    with pytest.raises(UnsupportedDrafter, match="guessing the most frequent one"):
        redrafter.load(str(folder), drafter="mtp", dtype="fp32", device="cpu")


def test_auto_copies_alone_where_the_module_does_not_run(trained, caplog, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(mtp, "read", fails)
    engine = redrafter.load(str(trained), dtype="fp32", device="cpu")
    assert isinstance(engine.drafter, NgramDrafter)
    assert "is drafted for with n-grams alone: " in caplog.text
    assert "no room" in caplog.text


def refused(folder, target, kind) -> str:
    with pytest.raises(kind) as caught:
        mtp.read(folder, target)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_a_target_without_a_module_says_so(tmp_path):
    model = make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelNotFound, match="has no MTP module"):
        redrafter.load(str(tmp_path), drafter="mtp", device="cpu")
    nowhere = load_target(make_model())
    assert not mtp.exists(nowhere)
    with pytest.raises(ModelNotFound, match="'mtp' is read from the target's own checkpoint, and the files of llama"):
        redrafter.load(nowhere.model, drafter="mtp")


@pytest.mark.parametrize(
    ("name", "renamed", "message"),
    [
        (f"{LAST}eh_proj.weight", "lost.weight", "has no MTP module"),
        (f"{LAST}hnorm.weight", "lost.weight", f"lacks '{LAST}hnorm.weight'"),
        (f"{LAST}self_attn.q_proj.weight", "lost.weight", f"lacks '{LAST}self_attn.q_proj.weight'"),
        (f"{LAST}mlp.experts.1.up_proj.weight", "lost.weight", "lacks 'mlp.experts.1.up_proj.weight'"),
        (f"{LAST}hnorm.weight", f"{LAST}other.weight", "lacks"),
        (f"{LAST}eh_proj.weight", "model.mtp_layers.0.input_proj.weight", "in a layout that redrafter does not read"),
    ],
)
def test_missing_tensors_and_other_layouts_are_named(name, renamed, message, tmp_path, target):
    write("glm-4.5", tmp_path)
    change(tmp_path, lambda tensors: {renamed if k == name else k: v for k, v in tensors.items()})
    assert message in refused(tmp_path, target, RedrafterError)


def test_extra_tensors_are_named(tmp_path, target):
    write("glm-4.5", tmp_path)
    change(tmp_path, lambda tensors: tensors | {f"{LAST}self_attn.sinks": torch.ones(4)})
    assert f"does not know: '{LAST}self_attn.sinks'" in refused(tmp_path, target, CorruptCheckpoint)
    write("qwen3.5", tmp_path / "qwen")
    qwen = load_target(str(tmp_path / "qwen"), dtype="fp32", device="cpu")
    change(tmp_path / "qwen", lambda tensors: tensors | {"mtp.other.weight": torch.ones(4)})
    assert "does not know: 'mtp.other.weight'" in refused(tmp_path / "qwen", qwen, CorruptCheckpoint)


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("eh_proj.weight", torch.ones(16, 32), DrafterMismatch, "has the shape (16, 32), and for hidden states of 32"),
        ("shared_head.head.weight", torch.ones(50, 32), DrafterMismatch, "a vocabulary of 50, but the target"),
        ("self_attn.q_proj.weight", torch.ones(8, 32), CorruptCheckpoint, "cannot load the MTP module"),
        ("self_attn.q_proj.weight", torch.full((32, 32), torch.nan), CorruptCheckpoint, "not finite"),
        ("self_attn.q_proj.weight", torch.ones(32, 32).long(), CorruptCheckpoint, "has the type torch.int64"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(name, value, kind, message, tmp_path, target):
    write("glm-4.5", tmp_path)
    change(tmp_path, lambda tensors: tensors | {LAST + name: value})
    assert message in refused(tmp_path, target, kind)


def test_an_embedding_and_a_head_of_its_own_are_kept(tmp_path, target):
    net = mtp.read(write("glm-4.5", tmp_path), target).net
    assert net.head is None
    assert net.embedding is None
    tensors = load_file(tmp_path / "model.safetensors")
    other = {name: tensors[LAST + name] + 1 for name in ("shared_head.head.weight", "embed_tokens.weight")}
    change(tmp_path, lambda tensors: tensors | {LAST + name: tensor for name, tensor in other.items()})
    net = mtp.read(tmp_path, target).net
    assert torch.equal(net.head.weight, other["shared_head.head.weight"])
    assert torch.equal(net.embedding.weight, other["embed_tokens.weight"])


def test_the_first_of_two_modules_is_read(tmp_path, target):
    write("glm-4.5", tmp_path)
    again = f"model.layers.{LAYERS + 1}."
    change(tmp_path, lambda tensors: tensors | {k.replace(LAST, again): 2 * v for k, v in tensors.items() if LAST in k})
    found = mtp.read(tmp_path, target)
    assert found.format.endswith("the first of 2")
    assert torch.equal(found.net.fuse.weight, mtp.read(write("glm-4.5", tmp_path / "one"), target).net.fuse.weight)


def test_a_module_in_fp8_is_dequantised(tmp_path, target):
    """As DeepSeek-V3 stores the matrices of its module's layer; other tensors are in 16 bits."""
    write("glm-4.5", tmp_path)
    name, rounded, scale = f"{LAST}self_attn.q_proj", torch.randn(32, 32).to(torch.float8_e4m3fn), torch.rand(2, 2)
    change(tmp_path, lambda tensors: tensors | {f"{name}.weight": rounded, f"{name}.weight_scale_inv": scale})
    assert "does not say how it is quantised" in refused(tmp_path, target, CorruptCheckpoint)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    [layer] = mtp.read(tmp_path, target).net.blocks
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.allclose(layer.layer.self_attn.q_proj.weight, rounded.float() * spread)


@pytest.mark.parametrize("name", MODULES)
def test_damaged_modules_are_refused_in_one_line_or_used(name, tmp_path):
    """The damage of the fuzz tests, a few of each layout."""
    made = MODULES[name]()
    made.write(tmp_path)
    files = [tmp_path / "config.json", tmp_path / made.file]
    whole = [file.read_bytes() for file in files]
    rng, refusals = random.Random(1), []
    for _ in range(24):
        at = rng.randrange(2)
        files[at].write_bytes((damaged_config, damaged_weights)[at](whole[at], rng))
        files[1 - at].write_bytes(whole[1 - at])
        try:
            drafted(tmp_path)
        except RedrafterError as error:
            refusals.append(str(error))
    assert 5 < len(refusals) < 24
    assert not any("\n" in refusal or len(refusal) > 700 for refusal in refusals)


def test_what_chooses_experts_keeps_its_bits():
    """bf16 holds 8 bits of it, and would choose other experts."""
    layer, bias = torch.nn.Linear(4, 4), torch.tensor([1.001, 1.002])
    layer.register_buffer("e_score_correction_bias", bias.clone())
    cast = TargetLayer(layer, None).to(torch.bfloat16)
    assert torch.equal(cast.layer.e_score_correction_bias, bias)
    assert not torch.equal(bias.bfloat16().float(), bias), "the twin: the cast would be seen"
    assert cast.layer.weight.dtype == torch.bfloat16
