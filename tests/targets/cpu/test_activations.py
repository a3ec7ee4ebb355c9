"""Rounded activations: transformers' logits over rounded inputs, the same bits in every pass, plain decoding's text."""

import pytest
import torch
from torch import nn

import redrafter
from redrafter import Engine, Shape
from redrafter.core.cache import KVCache
from redrafter.drafters import NgramDrafter
from redrafter.errors import ConfigError
from redrafter.kernels.cpu import library
from redrafter.targets.cpu import packed_target
from tests.helpers.zoo import PROMPTS, VOCAB, recurrent_drafter
from tests.kernels.test_cpu_packed import seen_in_8_bits
from tests.targets.cpu.test_packed import LAYERS, model, one_by_one, packed, rounded, trees

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")


def with_activations(kind, bits, name):
    target = packed(kind, bits)
    target.use_activations(name)
    return target


def round_input(_, inputs):
    (x,) = inputs
    seen = seen_in_8_bits(x.detach().reshape(-1, x.shape[-1]).numpy())
    return torch.from_numpy(seen).reshape(x.shape)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_logits_are_those_of_transformers_with_rounded_inputs(kind):
    """Closer to them than to those of fp32 activations, by far: near halves the two may round to neighbours."""
    for bits in (8, 4):
        theirs = rounded(kind, bits)
        for module in theirs.model.modules():
            if isinstance(module, nn.Linear) and module.in_features % 32 == 0:
                module.register_forward_pre_hook(round_input)
        ours = (theirs, *(with_activations(kind, bits, name) for name in ("int8", "fp32")))
        wanted, made, exact = (trees(each)[5] for each in ours)
        assert float((made - wanted).norm()) < 0.3 * float((exact - wanted).norm())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_16_bits_round_a_hundredth_as_much_as_8(kind):
    for bits in (8, 4):
        made, eight, exact = (trees(with_activations(kind, bits, name))[5] for name in ("int16", "int8", "fp32"))
        assert 0 < float((made - exact).norm()) < 0.02 * float((eight - exact).norm())


def test_int16_is_the_default_of_quantised_weights():
    """And floats, which nothing rounds, are said to be multiplied in fp32."""
    assert packed("llama", 4).activations == "int16"
    floats = packed("llama", None)
    assert floats.activations == "fp32"
    assert floats.forward_kind == "packed"
    with pytest.raises(ConfigError, match="activations int8 is for quantised weights"):
        floats.use_activations("int8")


@pytest.mark.usefixtures("lib")
@pytest.mark.parametrize("name", ["int16", "int8"])
def test_a_token_has_the_same_bits_in_every_pass(name):
    for kind, kv_dtype, bits in (("qwen3", "fp32", 4), ("gemma3", "int8", 8)):
        target = with_activations(kind, bits, name)
        target.use_kv_dtype(kv_dtype)
        tokens, lengths, tree, first, states, logits, hidden = trees(target)
        for row, length in enumerate(lengths):
            path = tree.mask[row, int(tree.valid[row].sum()) - 1].nonzero()[:, 0]
            text = torch.cat([tokens[row, :length], tree.tokens[row, path]])
            alone, seen = one_by_one(target, text)
            assert torch.equal(alone[length:], logits[row, path])
            assert torch.equal(seen[length:], hidden[row, path])
            assert torch.equal(alone[length - 1], first[row])
            assert torch.equal(seen[:length], states[row, :length])


@pytest.mark.parametrize("name", ["int16", "int8"])
def test_a_prompt_has_the_same_bits_in_pieces_of_any_length(name):
    target, text = with_activations("llama", 4, name), torch.arange(75)[None] % VOCAB
    wanted = one_by_one(target, text[0])[1]
    for pieces in ((75,), (40, 35), (3, 20, 33, 19)):
        cache, found, at = KVCache(slots=75), [], 0
        for length in pieces:
            last = torch.tensor([length - 1])
            found.append(target.read(text[:, at : at + length], at, cache, LAYERS, last)[1])
            at += length
        assert torch.equal(torch.cat(found, 1)[0], wanted)


def test_texts_are_those_of_plain_decoding():
    target = with_activations("qwen3", 8, "int8")
    for drafter in (NgramDrafter(), recurrent_drafter(target, exit_size=32)):
        engine = Engine(target, drafter, shape=Shape(width=3, length=3), exact="require")
        assert engine.exactness == "bitwise"
        for temperature in (0.0, 1.0):
            options = {"max_new_tokens": 20, "temperature": temperature, "seed": 5}
            done, plain = engine.generate(PROMPTS, **options), engine.plain().generate(PROMPTS, **options)
            assert [c.tokens for c in done] == [c.tokens for c in plain]


def test_twin_a_scale_shared_by_all_tokens_of_a_pass_is_noticed(monkeypatch):
    """A token in company is compared with itself alone: a pass that rounds by the number of tokens must be caught."""
    target, text = with_activations("llama", 8, "int8"), torch.arange(40)[None] % VOCAB
    wanted = one_by_one(target, text[0])[1]
    run = target.packed.run
    monkeypatch.setattr(
        target.packed, "run", lambda lines, *a, **k: run(lines, *a, **(k | {"bits": 8 * (len(lines) < 9)}))
    )
    together = target.read(text, 0, KVCache(slots=40), LAYERS, torch.tensor([39]))[1][0]
    assert not torch.equal(together, wanted)


def test_the_engine_says_what_the_text_is(tmp_path, caplog):
    """And a model without packed weights has no such choice."""
    model("llama").save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        engine = redrafter.load(tmp_path, "ngram", dtype="q8", device="cpu", activations="int8", kv_dtype="fp16")
    assert "the text is that of int8 activations" in caplog.text
    assert engine.target.forward_kind == "packed, fp16 KV cache, int8 activations"
    assert engine.exactness == "bitwise"
    with pytest.raises(ConfigError, match="activations can be in int16 or int8 or fp32, got 'int4'"):
        engine.target.use_activations("int4")
    with pytest.raises(ConfigError, match="activations int8 is for packed weights on a CPU"):
        packed_target.use_rounding(rounded("llama"), "fp32", "int8")
