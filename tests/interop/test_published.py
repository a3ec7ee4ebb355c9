"""Published drafters: our outputs are the originals', texts are exact, and what does not fit is refused by name."""

import json
import os
import pickle
import random
import zipfile
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

import redrafter
from benchmarks.formats import GOLDEN, TOLERANCE, compared, difference, drafted
from benchmarks.tiny_drafters import DRAFT_VOCAB, LAYERS, MODULES, TINY, VOCAB, Tiny, TinyTarget
from redrafter import Engine, RuleConfig, Shape
from redrafter.drafters import NoDrafter, WithNgrams
from redrafter.drafters.load import bind
from redrafter.errors import CorruptCheckpoint, DrafterMismatch, RedrafterError, UnsupportedDrafter
from redrafter.interop import published
from redrafter.interop.published import recognise
from redrafter.targets import load_target
from tests.fuzz.drafter_folders import damaged_config, damaged_weights
from tests.helpers.zoo import PROMPTS, make_model

HOT = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3}
MIXED = "EAGLE-3, speculators"
"""The format that sets the most options."""
EACH_NETWORK = (MIXED, "DFlash, speculators", "DSpark, recurrent Markov head")


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(num_hidden_layers=LAYERS, layer_types=None))


def tiny(name: str, folder, **changes) -> str:
    made = TINY[name]()
    made.config.update(changes)
    return str(made.write(folder))


def drafter_of(name, folder, target, reading=0):
    found = published.read(TINY[name]().write(folder), target)
    found.net.config = found.readings[reading].config
    return bind(found.net, target)


def test_every_format_gives_what_its_original_gave():
    rows = {row["format"]: row["difference"] for row in compared()}
    assert rows.keys() == (TINY | MODULES).keys()
    checked = {name: found for name, found in rows.items() if found is not None}
    assert checked.keys() == json.loads(GOLDEN.read_text()).keys()
    assert {name: found for name, found in checked.items() if found > TOLERANCE} == {}


@pytest.mark.parametrize("change", [{"norm_before_residual": False}, {"norm_output": False}, {"rms_norm_eps": 0.1}])
def test_twin_another_convention_is_another_output(tmp_path, change):
    made = TINY[MIXED]()
    (made.config["transformer_layer_config"] if "rms_norm_eps" in change else made.config).update(change)
    golden = torch.tensor(json.loads(GOLDEN.read_text())[MIXED]["logits"])
    assert difference(drafted(made.write(tmp_path)), golden) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("DFlash", {"rope_theta": 6000.0}),
        ("JetSpec", {"dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 3, 5]}}),
        ("DSpark", {"sample_from_anchor": False}),
        ("DFlash, speculators", {"sliding_window_non_causal": True}),
    ],
)
def test_twin_another_block_is_another_output(name, change, tmp_path):
    made = TINY[name]()
    made.config.update(change)
    golden = torch.tensor(json.loads(GOLDEN.read_text())[name]["logits"])
    assert difference(drafted(made.write(tmp_path)), golden) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["DSpark", MIXED])
def test_the_rule_rejection_draws_from_it(name, tmp_path, target):
    rule = RuleConfig(name="rejection", branching=(2, 1, 1, 1, 1, 1))
    engine = Engine(target, drafter_of(name, tmp_path, target), shape=Shape(width=2, length=6), rule=rule)
    greedy = Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=8)
    assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=8)] == [c.tokens for c in greedy]
    assert len(engine.generate(PROMPTS[0], max_new_tokens=8, **HOT).tokens) == 8


@pytest.mark.parametrize("name", ["DSpark"])
def test_a_tree_has_more_right_guesses_than_a_chain(name, tmp_path, target):
    drafter, accepted = drafter_of(name, tmp_path, target), []
    for shape in (Shape(width=8, length=4, nodes=24), Shape(width=1, length=4)):
        done = Engine(target, drafter, shape=shape).generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=3)
        accepted.append(sum(c.stats.tokens_per_step for c in done))
    assert accepted[0] > accepted[1]


@pytest.mark.parametrize("mask", [torch.zeros(32), {"mask": torch.ones(1, 32)}], ids=["a tensor", "in a dictionary"])
def test_an_embedding_of_masks_in_a_file_of_its_own(mask, tmp_path, target):
    TINY["DFlash"]().write(tmp_path)
    before = drafted(tmp_path)
    torch.save(mask, tmp_path / "mask_embedding.pt")
    assert not torch.allclose(drafted(tmp_path), before)
    for damaged in (torch.zeros(31), [1], {"a": torch.ones(32), "b": torch.ones(32)}, torch.full((32,), torch.nan)):
        torch.save(damaged, tmp_path / "mask_embedding.pt")
        assert "mask_embedding.pt" in refused(tmp_path, target)
    torch.save(mask, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain:
        parts = {name: plain.read(name) for name in plain.namelist()}
    for compression, pickled in (
        (zipfile.ZIP_DEFLATED, None),
        (zipfile.ZIP_STORED, b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."),  # 2 GiB
    ):
        with zipfile.ZipFile(tmp_path / "mask_embedding.pt", "w", compression) as packed:
            for name, part in parts.items():
                packed.writestr(name, pickled if pickled and name.endswith("data.pkl") else part)
        assert "it has parts that torch.save does not write" in refused(tmp_path, target)
    (tmp_path / "mask_embedding.pt").write_bytes(pickle.dumps(Runs(tmp_path)))
    assert "mask_embedding.pt" in refused(tmp_path, target)
    assert not (tmp_path / "ran").exists()


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, folder) -> None:
        self.folder = folder

    def __reduce__(self):
        return (open, (str(self.folder / "ran"), "w"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DFlash", {"block_size": 10**9}, "does not describe a drafter"),
        ("DFlash", {"block_size": 1}, "does not describe a drafter"),
        ("DFlash", {"num_hidden_layers": 2**31 - 1, "layer_types": None}, "num_hidden_layers must be"),
        ("DFlash", {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "mask_token_id must be"),
        ("DFlash", {"dflash_config": {"mask_token_id": 40, "target_layer_ids": [1, 3, 5]}}, "mask token 40 is not in"),
        ("DFlash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 8]}}, "whole numbers from 0 to 7"),
        ("DFlash", {"dflash_config": [1]}, "must be objects"),
        ("DFlash", {"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ("DFlash", {"layer_types": ["sliding_attention"] * 2}, "sliding_window must be"),
        ("DSpark", {"markov_head_type": "other"}, "markov_head_type must be"),
        ("DSpark", {"markov_rank": 10**6}, "has the shape"),
        ("DFlash, speculators", {"aux_hidden_state_layer_ids": None}, "has no aux_hidden_state_layer_ids"),
    ],
    ids=str,
)
def test_block_configurations_that_are_refused(name, changes, message, tmp_path, target):
    tiny(name, tmp_path, **changes)
    with pytest.raises(RedrafterError, match=message) as caught:
        published.read(tmp_path, target)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def plain(target):
    """Plain decoding's texts, greedy and sampled."""
    alone = Engine(target, NoDrafter())
    return [[c.tokens for c in alone.generate(PROMPTS, max_new_tokens=12, **how)] for how in ({}, HOT)]


@pytest.mark.parametrize("name", TINY)
def test_texts_are_those_of_plain_decoding(name, tmp_path, target, plain):
    alone, shape = drafter_of(name, tmp_path, target), Shape(width=3, length=4, nodes=9)
    for drafter, how, texts in ((alone, {}, plain[0]), (alone, HOT, plain[1]), (WithNgrams(alone), HOT, plain[1])):
        engine = Engine(target, drafter, shape=shape)
        done = engine.generate(PROMPTS, max_new_tokens=12, batch_size=3, **how)  # rows leave and join
        assert [c.tokens for c in done] == texts
        assert sum(c.stats.nodes for c in done) > 0
        if how:
            assert sum(c.stats.accepted for c in done) > 3, "else no guess was right"


@pytest.mark.parametrize("name", EACH_NETWORK)
def test_steps_over_fixed_buffers(name, tmp_path, target):
    """What a GPU records: the same texts in the same steps."""
    drafter, shape = drafter_of(name, tmp_path, target), Shape(width=3, length=3)
    eager, fixed = (Engine(target, drafter, shape=shape, runtime="graphs") for _ in range(2))
    fixed.recorded = True
    for prompts in (PROMPTS[:3], PROMPTS[3:4]):
        a, b = (e.generate(list(prompts), max_new_tokens=10, **HOT) for e in (eager, fixed))
        assert [c.tokens for c in a] == [c.tokens for c in b]
        assert [c.stats.accepted_per_step for c in a] == [c.stats.accepted_per_step for c in b]
    assert fixed.recorded


@pytest.mark.parametrize("name", EACH_NETWORK)
def test_guesses_do_not_depend_on_the_batch(name, tmp_path, target):
    engine = Engine(target, drafter_of(name, tmp_path, target), shape=Shape(width=3, length=3))
    together = engine.generate(PROMPTS[:3], max_new_tokens=10, **HOT)
    for prompt, own in zip(PROMPTS[:3], together, strict=True):
        assert engine.generate(prompt, max_new_tokens=10, **HOT).stats.accepted_per_step == own.stats.accepted_per_step


def test_nested_layers_and_unsaid_conventions_are_readings(tmp_path, target):
    found = published.read(TINY["EAGLE-3, NVIDIA"]().write(tmp_path), target)
    assert {reading.config.layers for reading in found.readings} == {(1, 3, 4), (2, 4, 5)}
    assert len(found.readings) == 2 * 2 * 2
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS - 1]}
    tiny("EAGLE-3, NVIDIA", tmp_path, eagle_config=nested)
    read = published.read(tmp_path, target).readings
    assert {reading.config.layers for reading in read} == {(1, 3, 7)}, "the last state is normalised"
    assert len(published.read(TINY[MIXED]().write(tmp_path / "said"), target).readings) == 1


def refused(folder, target, kind=CorruptCheckpoint) -> str:
    with pytest.raises(kind) as caught:
        redrafter.load(target.model, drafter=str(folder))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", EACH_NETWORK)
def test_missing_extra_and_misshapen_tensors_are_named(name, tmp_path, target):
    made = TINY[name]()
    whole = dict(made.tensors)
    lost = "fc.weight"
    Tiny(made.config, {k: v for k, v in whole.items() if k != lost}).write(tmp_path)
    assert f"lacks '{lost}'" in refused(tmp_path, target)
    Tiny(made.config, whole | {"other.weight": torch.ones(3)}).write(tmp_path)
    assert "does not know: 'other.weight'" in refused(tmp_path, target)
    Tiny(made.config, whole | {lost: whole[lost][:, 1:]}).write(tmp_path)
    assert f"{lost} has the shape" in refused(tmp_path, target)
    Tiny(made.config, whole | {lost: whole[lost] * torch.nan}).write(tmp_path)
    assert "not finite" in refused(tmp_path, target)


@pytest.mark.parametrize(
    "offsets",
    [[10**12], [VOCAB], [-1], [2**63 - 1], [0, -1]],
    ids=["huge", "too large", "negative", "the largest", "twice"],
)
def test_draft_tokens_are_different_tokens_of_the_target(offsets, tmp_path, target):
    made = TINY[MIXED]()
    d2t = made.tensors["d2t"].clone()
    d2t[: len(offsets)] = torch.tensor(offsets)
    Tiny(made.config, made.tensors | {"d2t": d2t}).write(tmp_path)
    assert "token_ids must be different token ids" in refused(tmp_path, target)
    Tiny(made.config, made.tensors | {"d2t": d2t.float()}).write(tmp_path)
    assert f"d2t must be {DRAFT_VOCAB} whole numbers" in refused(tmp_path, target)


def test_another_vocabulary_or_width_is_refused_with_both_numbers(tmp_path, target):
    tiny("EAGLE-3, EAGLE", tmp_path, vocab_size=50)
    assert "vocabulary of 50, but" in (message := refused(tmp_path, target, DrafterMismatch))
    assert f"has one of {VOCAB}" in message
    tiny("EAGLE-3, EAGLE", tmp_path, target_hidden_size=64)
    assert "hidden states of 64 numbers, but those of the target" in refused(tmp_path, target, DrafterMismatch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**12}, "hidden_size must be"),
        ({"intermediate_size": 2**20}, "has the shape"),
        ({"num_attention_heads": 2**19}, "head_dim must be"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be a whole number from 1 to 64"),
        ({"head_dim": 2**30}, "head_dim must be a whole number from 1 to 4096"),
        ({"num_key_value_heads": 2**30}, "does not describe a drafter|has the shape"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type must be"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "does not describe rotary positions"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"rope_theta": "x"}, "rope_theta must be a number"),
        ({"rms_norm_eps": -1}, "does not describe a drafter"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
        (
            {"partial_rotary_factor": 1, "rope_scaling": {"rope_type": "linear", "partial_rotary_factor": 2**30}},
            "a part of a head",
        ),
        ({"draft_vocab_size": "x"}, "draft_vocab_size must be"),
        ({"norm_before_residual": "x"}, "must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, LAYERS]}, "must be a list of whole numbers from 0 to 7"),
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads one hidden state"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes, message, tmp_path, target):
    tiny("EAGLE-3, EAGLE", tmp_path, **changes)
    with pytest.raises(RedrafterError, match=message) as caught:
        published.read(tmp_path, target)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_pipe_in_place_of_the_weights(tmp_path, target):
    """Opening it would wait for ever."""
    tiny("EAGLE-3, EAGLE", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    assert "it is no file" in refused(tmp_path, target)


def test_pickles_are_not_opened(tmp_path, target):
    tiny("EAGLE-3, EAGLE", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "a pickle, which can run any code" in refused(tmp_path, target)


@pytest.mark.parametrize(
    ("config", "tensors", "name"),
    [
        ({"speculators_model_type": "peagle"}, (), "P-EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ("mask_hidden",), "P-EAGLE"),
        ({"speculators_model_type": "dflash2"}, (), "DFlash2"),
        ({"architectures": ["DFlashDraftModel"]}, ("candidate_selector.hidden_projection.weight",), "DFlash2"),
        ({"dflash_config": {"projector_type": "domino"}}, (), "Domino"),
        ({"speculators_model_type": "mtp"}, (), "MTP in a folder of its own"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, (), "EAGLE (1 or 2)"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, (), "MLPSpeculator"),
    ],
)
def test_other_formats_are_refused_by_name(config, tensors, name, tmp_path, target):
    assert recognise(config, frozenset(tensors)) == name
    Tiny({"model_type": "llama"} | config, {t: torch.ones(2) for t in tensors or ("x",)}).write(tmp_path)
    assert f"is {name}, which redrafter does not run" in refused(tmp_path, target, UnsupportedDrafter)


def test_a_gguf_drafter_is_refused_by_name(tmp_path, target):
    (tmp_path / "drafter.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file" in refused(tmp_path, target, UnsupportedDrafter)


def test_ordinary_models_are_no_published_drafters(target, tmp_path):
    target.model.save_pretrained(tmp_path)
    assert published.read(tmp_path, target) is None


def test_an_embedding_that_is_the_targets_is_not_kept_twice(tmp_path, target):
    made = TINY[MIXED]()
    assert published.read(made.write(tmp_path / "another"), target).net.config.own_embedding
    made.tensors["embed_tokens.weight"] = target.input_embedding.weight.detach().clone()
    found = published.read(made.write(tmp_path), target)
    assert not found.net.config.own_embedding
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert published.read(tmp_path, target).net.config.own_embedding


def outcome(folder) -> str:
    """Why a folder is refused, or that it is used; a folder that is nothing known is somebody else's."""
    try:
        found = published.read(folder, TinyTarget())
        if found is not None:
            drafted(folder)
    except RedrafterError as error:
        return str(error)
    return "used" if found else "unknown"


@pytest.mark.parametrize("name", TINY)
def test_damaged_folders_are_refused_in_one_line_or_used(name, tmp_path):
    """The damage of the fuzz tests, a few of each format; they never allocate what no file holds."""
    made = TINY[name]()
    made.write(tmp_path)
    files = [tmp_path / "config.json", tmp_path / made.file]
    whole = [file.read_bytes() for file in files]
    rng, ends = random.Random(1), Counter()
    for _ in range(24):
        at = rng.randrange(2)
        files[at].write_bytes((damaged_config, damaged_weights)[at](whole[at], rng))
        files[1 - at].write_bytes(whole[1 - at])
        end = outcome(tmp_path)
        assert "\n" not in end
        assert len(end) < 700
        ends["used" if end == "used" else "refused"] += 1
    assert ends["refused"] > 5
    assert ends["used"] > 1
