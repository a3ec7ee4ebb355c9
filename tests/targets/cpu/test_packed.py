"""Targets with packed weights: the logits of transformers over the same weights, and the same bits in every pass."""

import copy
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from redrafter import Engine, Shape
from redrafter.core import flat
from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece
from redrafter.core.tree import chain_tree, pack_beam
from redrafter.drafters import NgramDrafter
from redrafter.drafters.options import DrafterOptions
from redrafter.errors import ConfigError, UnsupportedTarget
from redrafter.kernels.cpu import library
from redrafter.kernels.cpu.matrices import Floats, quantise
from redrafter.kernels.cpu.model import LayerWeights, PassModel, shapes_of
from redrafter.targets import Target, load_target
from redrafter.targets.cpu import packed_load
from redrafter.targets.cpu.packed_load import from_module
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.train.config import TrainConfig
from redrafter.train.setup import check as train_check
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")

KINDS = ("llama", "qwen2", "qwen2-mixed", "qwen3", "mistral", "gemma3", "granite", "phi3", "smollm3")
LAYERS = (0, 1, -1)


def model(kind):
    return make_model(kind, torch.float32, head_dim=16)


def packed(kind, bits=8):
    own = model(kind)
    return from_module(own, None, kind, bits, lambda: own)


def rounded(kind, bits=8):
    """The transformers model whose matrices are those that the packed model keeps."""
    own = copy.deepcopy(model(kind))
    with torch.no_grad():
        for weight in {id(p): p for p in own.parameters() if p.dim() == 2}.values():
            if weight.shape[1] % 32 == 0:
                weight.copy_(torch.from_numpy(quantise(weight.numpy(), bits).dequantise()))
    return Target(own)


def trees(target):
    """Ragged rows with a tree each -> logits and hidden states of all nodes, and the trees. Empty nodes have 0."""
    torch.manual_seed(1)
    tokens, lengths = torch.randint(VOCAB, (2, 30)), [30, 21]
    beam = torch.randint(VOCAB, (2, 3, 3))
    beam[:, 1, :2] = beam[:, 0, :2]
    tree, _ = pack_beam(beam, tokens[:, 0])
    cache = KVCache(slots=30 + tree.nodes + 1)
    with torch.no_grad():
        first, states = target.prefill(tokens, lengths, cache, LAYERS)
        logits, hidden = target.verify(tree, torch.tensor(lengths), cache, LAYERS)
    real = tree.valid[..., None]
    assert not real.all()
    return tokens, lengths, tree, first, states, logits * real, hidden * real


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind):
    for bits in (8, 4):
        wanted, target = trees(rounded(kind, bits)), packed(kind, bits)
        for activations, most in (("fp32", 1e-5), ("int16", 1e-3)):
            target.use_activations(activations)
            for ours, theirs in zip(trees(target)[3:], wanted[3:], strict=True):
                if ours.dim() == 3 and ours.shape[1] == 30:  # hidden states of prompts: padding has no meaning
                    ours, theirs = ours[:, :21], theirs[:, :21]
                assert float((ours - theirs).norm() / theirs.norm()) < most


@pytest.mark.usefixtures("lib")
def test_a_token_has_the_same_bits_in_every_pass():
    rounded = [(kind, kv_dtype) for kind in ("qwen3", "gemma3") for kv_dtype in ("fp16", "int8")]
    for kind, kv_dtype in [*((kind, "fp32") for kind in KINDS), *rounded]:
        target = packed(kind)
        target.use_kv_dtype(kv_dtype)
        tokens, lengths, tree, first, states, logits, hidden = trees(target)
        for row, length in enumerate(lengths):
            nodes = tree.valid[row].nonzero()[:, 0].tolist()
            for leaf in set(nodes) - set(tree.parents[row, nodes[1:]].tolist()):
                path = tree.mask[row, leaf].nonzero()[:, 0]
                text = torch.cat([tokens[row, :length], tree.tokens[row, path]])
                alone, seen = one_by_one(target, text)
                assert torch.equal(alone[length:], logits[row, path])
                assert torch.equal(seen[length:], hidden[row, path])
                assert torch.equal(alone[length - 1], first[row])
                assert torch.equal(seen[:length], states[row, :length])


def mixture(target, seed, pieces=True):
    """A pass over random trees and pieces of prompts -> for each token its text, and its hidden states; and logits."""
    random = torch.Generator().manual_seed(seed)

    def draw(most, *shape):
        return torch.randint(most, shape, generator=random)

    rows, longest = int(draw(3)) + 1, 40
    texts, lengths = draw(VOCAB, rows + 2, 140), draw(longest, rows)
    width, length = (2, 20) if seed % 3 == 2 else (int(draw(4)) + 1, int(draw(5)) + 1)  # 20: no GPU takes such a tree
    beam = draw(3, rows, width, length)
    last = texts.gather(1, lengths[:, None])[:rows, 0]
    tree, _ = pack_beam(beam, last, max(1, int(draw(width * length))))
    cache = KVCache(slots=140)
    known = [*lengths.tolist(), *draw(longest, 2).tolist()]
    target.read_pieces([Piece(row, 0, texts[row, :n].tolist()) for row, n in enumerate(known) if n], cache, ())
    sizes = [int(n) for n in draw(60, 2) + 1]
    read = [
        Piece(rows + i, known[rows + i], texts[rows + i, known[rows + i] :][:n].tolist()) for i, n in enumerate(sizes)
    ]
    logits, hidden, states = target.verify_and_read(tree, lengths, cache, LAYERS, read if pieces else ())
    found = []
    for row, node in tree.valid.nonzero().tolist():
        path = tree.mask[row, node].nonzero()[:, 0]
        text = torch.cat([texts[row, : lengths[row]], tree.tokens[row, path]])
        found.append((text, hidden[row, node], logits[row, node]))
    for piece, own in zip(read, states.split(sizes) if pieces else (), strict=False):
        for i, state in enumerate(own):
            found.append((texts[piece.place, : piece.begin + i + 1], state, None))
    return found


def differences(target, found):
    """How many tokens of a pass have other bits than at the end of their texts alone."""
    count = 0
    for text, state, scores in found:
        last = torch.tensor([len(text) - 1])
        logits, hidden = target.read(text[None], 0, KVCache(slots=len(text)), LAYERS, last)
        count += not torch.equal(hidden[0, -1], state) or (scores is not None and not torch.equal(logits[0, 0], scores))
    return count


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_token_has_the_same_bits_in_every_mixture(kind):
    target = packed(kind)
    for seed in range(4):
        assert differences(target, mixture(target, seed)) == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_masks_give_the_same_bits_as_lines(kind):
    """A draft model is given masks."""
    target = packed(kind)
    tokens, lengths, tree, *_, logits, hidden = trees(target)
    cache = KVCache(slots=30 + tree.nodes + 1)
    target.prefill(tokens, lengths, cache, ())

    def masked(tree):
        found = Target.verify(target, tree, torch.tensor(lengths), cache, LAYERS)
        return [made[tree.valid] for made in found]

    wanted = [made[tree.valid] for made in (logits, hidden)]
    assert all(map(torch.equal, masked(tree), wanted))
    other = masked(replace(tree, mask=tree.mask.roll(1, 0)))
    assert not any(map(torch.equal, other, wanted)), "twin: the ancestors of the neighbour's row"


@torch.no_grad()
@pytest.mark.parametrize("name", ["of_pieces", "lines_of"])
def test_twin_a_token_that_sees_another_key(monkeypatch, name):
    own = getattr(flat, name)

    def shifted(*given, **options):
        made = own(*given, **options)
        lines = made if name == "lines_of" else made.lines
        lines[-1, -2] = lines[-1, -3]
        return made

    target = packed("llama")
    assert differences(target, mixture(target, 0)) == 0
    monkeypatch.setattr(flat, name, shifted)
    found = mixture(target, 0)
    monkeypatch.undo()
    assert differences(target, found) > 0


@pytest.mark.parametrize(("kind", "kv_dtype"), [("llama", "fp32"), ("gemma3", "fp32"), ("gemma3", "int8")])
def test_a_prompt_has_the_same_bits_in_pieces_of_any_length(kind, kv_dtype):
    target, text = packed(kind), torch.arange(75)[None] % VOCAB
    target.use_kv_dtype(kv_dtype)
    wanted = one_by_one(target, text[0])[1]
    for pieces in ((75,), (40, 35), (3, 20, 33, 19)):
        cache, found, at = KVCache(slots=75), [], 0
        for length in pieces:
            last = torch.tensor([length - 1])
            found.append(target.read(text[:, at : at + length], at, cache, LAYERS, last)[1])
            at += length
        assert torch.equal(torch.cat(found, 1)[0], wanted)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_tokens_outside_the_vocabulary_are_refused_before_they_become_addresses(token):
    target = packed("llama")
    wrong, cache = torch.tensor([[1, token]]), KVCache(slots=8)
    cache.extent = 8
    tree = chain_tree(torch.tensor([1]), [[token, 2]])
    for call in (
        lambda: target.input_embedding(wrong),
        lambda: target.output_embedding.rows(wrong[0]),
        lambda: target.read(wrong, 0, cache, (), torch.tensor([1])),
        lambda: target.verify(tree, torch.tensor([0]), cache, ()),
        lambda: target.verify(replace(tree, valid=torch.tensor([[True, True, False]])), torch.tensor([0]), cache, ()),
    ):
        with pytest.raises(ConfigError, match=f"got a token outside the model's vocabulary of {VOCAB} tokens"):
            call()
    assert target.input_embedding(torch.tensor([[0, VOCAB - 1]])).isfinite().all()
    empty = replace(tree, valid=torch.tensor([[True, False, False]]))
    assert target.verify(empty, torch.tensor([0]), cache, ())[0].isfinite().all(), "an empty node's token is not read"


def test_empty_nodes_are_not_run(monkeypatch):
    """Rows with guesses of different lengths pay for the guesses that there are."""
    target = packed("llama")
    last, chains = torch.tensor([1, 2, 3]), [[4, 5, 6], [], [7]]
    tree, lengths = chain_tree(last, chains), torch.tensor([0, 0, 0])
    run, ran = target.packed.lib.run_pass, []
    counted = mock.Mock(wraps=target.packed.lib)
    counted.run_pass = lambda model, call: (ran.append(call._obj.tokens), run(model, call))[1]
    monkeypatch.setattr(target.packed, "lib", counted)
    cache = KVCache(slots=8)
    cache.extent = 8
    logits, hidden = target.verify(tree, lengths, cache, LAYERS)
    assert ran == [int(tree.valid.sum())] == [7]
    for row, chain in enumerate(chains):
        alone, seen = one_by_one(target, torch.tensor([int(last[row]), *chain]))
        assert torch.equal(logits[row, : len(chain) + 1], alone)
        assert torch.equal(hidden[row, : len(chain) + 1], seen)
    assert not logits[~tree.valid].any()
    assert not hidden[~tree.valid].any()
    every = replace(tree, valid=torch.ones_like(tree.valid))
    assert target.verify(every, lengths, cache, LAYERS)[0][~tree.valid].any(), "twin: all nodes are run"
    assert ran[-1] == tree.valid.numel()


def one_by_one(target, text):
    """Plain decoding of a text: logits and hidden states of every token."""
    cache, found = KVCache(slots=len(text)), []
    for i, token in enumerate(text):
        at = torch.tensor([[i]])
        visible = torch.ones(1, 1, i + 1, dtype=torch.bool)
        keys = torch.arange(i + 1)[None]
        found.append(target.forward(token.view(1, 1), at, at, visible, keys, cache, LAYERS))
    logits, hidden = (torch.cat(parts, 1)[0] for parts in zip(*found, strict=True))
    return logits, hidden


def test_an_fp16_kv_cache_holds_the_rounded_keys_and_values():
    found = {}
    for name in ("fp32", "fp16"):
        target, cache = packed("llama"), KVCache(slots=40)
        target.use_kv_dtype(name)
        target.read(torch.arange(40)[None] % VOCAB, 0, cache, (), torch.tensor([39]))
        found[name] = cache.layers[0]  # of the first layer, which no rounding comes before
    for exact, half in zip(found["fp32"], found["fp16"], strict=True):
        assert torch.equal(half, exact.half())
    with pytest.raises(ConfigError, match="fp32 or fp16 or int8, got 'int4'"):
        packed("llama").use_kv_dtype("int4")


def test_an_int8_kv_cache_holds_bytes_and_a_scale_for_each_head():
    found = {}
    for name in ("fp32", "int8"):
        target, cache = packed("llama"), KVCache(slots=40)
        target.use_kv_dtype(name)
        target.read(torch.arange(40)[None] % VOCAB, 0, cache, (), torch.tensor([39]))
        found[name] = cache.layers[0]
    for exact, kept in zip(found["fp32"], found["int8"], strict=True):
        size = exact.shape[3]
        scale = kept[..., size:].contiguous().view(torch.float32)
        assert torch.equal(scale, exact.abs().amax(3, keepdim=True) / 127)
        assert ((kept[..., :size] * scale - exact).abs() <= 0.501 * scale).all()


def test_twin_the_scales_of_an_int8_kv_cache_are_read():
    target, cache, text = packed("llama"), KVCache(slots=41), torch.arange(40)[None] % VOCAB
    target.use_kv_dtype("int8")
    target.read(text, 0, cache, LAYERS, torch.tensor([39]))

    def following():
        at, visible = torch.tensor([[40]]), torch.ones(1, 1, 41, dtype=torch.bool)
        return target.forward(torch.tensor([[3]]), at, at, visible, torch.arange(41)[None], cache, LAYERS)[0]

    before = following()
    assert torch.equal(following(), before)
    values = cache.layers[0][1]
    values[:, :, 5, -4:] = values[:, :, 6, -4:]
    assert not torch.equal(following(), before)


def test_values_too_large_for_fp16_change_no_other_token():
    """An infinite value with weight 0 would turn the tokens before it into NaN, in a prompt but not alone."""
    own = copy.deepcopy(model("llama"))
    with torch.no_grad():
        own.model.layers[0].self_attn.v_proj.weight.mul_(1e6)
    target, text = from_module(own, None, "llama", 8, lambda: own), torch.arange(40)[None] % VOCAB
    target.use_kv_dtype("fp16")
    cache = KVCache(slots=40)
    together = target.read(text, 0, cache, LAYERS, torch.tensor([39]))[1][0]
    assert cache.layers[0][1].abs().max() == torch.finfo(torch.float16).max, "no value is too large"
    assert torch.equal(together, one_by_one(target, text[0])[1])
    assert together.isfinite().all()


def test_threads_change_no_bit():
    target, before = packed("llama"), torch.get_num_threads()
    alone = trees(target)
    torch.set_num_threads(2)
    try:
        together = trees(target)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone[3:], together[3:], strict=True))


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "int8"])
def test_texts_are_those_of_plain_decoding(kv_dtype):
    target = packed("qwen3")
    target.use_kv_dtype(kv_dtype)
    for drafter in (NgramDrafter(), recurrent_drafter(target, exit_size=32)):
        engine = Engine(target, drafter, shape=Shape(width=3, length=3), exact="require")
        assert engine.exactness == "bitwise"
        for temperature in (0.0, 1.0):
            options = {"max_new_tokens": 20, "temperature": temperature, "seed": 5}
            done, plain = engine.generate(PROMPTS, **options), engine.plain().generate(PROMPTS, **options)
            assert [c.tokens for c in done] == [c.tokens for c in plain]


def test_weights_of_other_shapes_are_refused():
    sizes = packed("qwen3").packed.sizes
    vector, matrix = np.ones(32, np.float32), Floats(np.ones((32, 32), np.float32))
    layer = LayerWeights(
        {name: Floats(np.ones(shape, np.float32)) for name, shape in shapes_of(sizes).items() if len(shape) == 2},
        {"before": vector, "before_mlp": vector, "q_norm": np.ones(16, np.float32)},
    )
    assert PassModel(sizes, [layer], matrix, None, vector).layer_count == 1
    for words, change in (
        ("the final norm", lambda: PassModel(sizes, [layer], matrix, None, vector[:31])),
        (
            "the output embedding",
            lambda: PassModel(sizes, [layer], matrix, Floats(np.ones((31, 32), np.float32)), vector),
        ),
        ("the embedding", lambda: PassModel(sizes, [layer], Floats(np.ones((32, 64), np.float32)), None, vector)),
        ("q_norm of a layer", lambda: PassModel(sizes, [with_vector(layer, "q_norm", vector)], matrix, None, vector)),
        ("needs before_mlp", lambda: PassModel(sizes, [with_vector(layer, "before_mlp")], matrix, None, vector)),
        ("multiple", lambda: PassModel(replace(sizes, kv_heads=3), [layer], matrix, None, vector)),
    ):
        with pytest.raises(UnsupportedTarget, match=words):
            change()


def with_vector(layer, name, value=None):
    others = {k: v for k, v in layer.vectors.items() if k != name}
    return replace(layer, vectors=others if value is None else others | {name: value})


def test_q8_from_a_folder(tmp_path):
    model("llama").save_pretrained(tmp_path / "m")
    target = load_target(tmp_path / "m", dtype="q8", device="cpu")
    assert isinstance(target, PackedTarget)
    assert target.name == "m"
    assert target.weight_bytes < 0.5 * sum(4 * p.numel() for p in model("llama").parameters())
    with pytest.raises(ConfigError, match="with dtype q8 the model's weights are rounded"):
        train_check(target, DrafterOptions(), TrainConfig(), Shape(width=1, length=2))
    for ours, theirs in zip(trees(target)[3:], trees(packed("llama"))[3:], strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match="dtype q8 is for"):
        load_target(tmp_path / "m", dtype="q8", device="cpu", revision="main")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_weights_of_a_bf16_checkpoint_are_kept_as_they_are(kind, tmp_path):
    """The arithmetic is that of the fp32 model, in little more than half its bytes."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        own, folder = copy.deepcopy(model(kind)).to(dtype), tmp_path / str(dtype)
        own.save_pretrained(folder)
        target = load_target(folder, dtype="stored", device="cpu")
        assert isinstance(target, PackedTarget)
        matrices = {id(p): p.numel() for p in own.parameters() if p.dim() == 2}
        assert target.weight_bytes < 1.2 * dtype.itemsize * sum(matrices.values()), "filled up to whole groups"
        assert next(target.model.parameters()).dtype is torch.float32, "drafters train on the same weights"
        for ours, theirs in zip(trees(target)[3:], trees(Target(target.model))[3:], strict=True):
            if ours.dim() == 3 and ours.shape[1] == 30:  # hidden states of prompts: padding has no meaning
                ours, theirs = ours[:, :21], theirs[:, :21]
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    engine = Engine(target, NgramDrafter(), shape=Shape(width=3, length=3), exact="require")
    options = {"max_new_tokens": 20, "temperature": 0.0}
    done, plain = engine.generate(PROMPTS, **options), engine.plain().generate(PROMPTS, **options)
    assert [c.tokens for c in done] == [c.tokens for c in plain]


def test_twin_one_weight_that_bf16_cannot_hold():
    own = copy.deepcopy(model("llama")).bfloat16().float()
    half = from_module(own, None, "llama", None, lambda: own).weight_bytes
    with torch.no_grad():
        own.model.layers[0].mlp.up_proj.weight[0, 0] = 1 + 2**-20
    assert from_module(own, None, "llama", None, lambda: own).weight_bytes > half


def test_nothing_is_compiled_for_a_model_that_does_not_use_it(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_load, "available", lambda: pytest.fail("compiled"))
    model("llama").save_pretrained(tmp_path / "m")
    assert not isinstance(load_target(tmp_path / "m", device="cpu"), PackedTarget)


def test_other_layers_than_plain_ones_are_refused():
    class Adapted(nn.Linear):
        """Such as an adapter's: it computes more than its weight says."""

    def refused(words, change):
        own = copy.deepcopy(model("llama"))
        change(own)
        with pytest.raises(UnsupportedTarget, match=words):
            from_module(own, None, "llama", 8, lambda: own)

    first = "model.layers.0"
    refused("q_proj of layer 0 is Adapted", lambda m: m.set_submodule(f"{first}.self_attn.q_proj", Adapted(32, 64)))
    refused("output embedding is Adapted", lambda m: m.set_submodule("lm_head", Adapted(32, VOCAB)))
    refused("quantised already", lambda m: setattr(m.config, "quantization_config", {"bits": 4}))
    refused("the shape", lambda m: m.set_submodule(f"{first}.mlp.up_proj", nn.Linear(32, 64, bias=False)))
    refused("no place for up_bias", lambda m: m.set_submodule(f"{first}.mlp.up_proj", nn.Linear(32, 48)))


def test_the_decoder_of_a_multimodal_model():
    text = model("gemma3")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text.config, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=False
    )
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    made = from_module(whole, None, "gemma3", 8, lambda: whole)
    for ours, theirs in zip(trees(made)[3:], trees(packed("gemma3"))[3:], strict=True):
        assert torch.equal(ours, theirs)


def test_unknown_models_are_refused():
    with pytest.raises(UnsupportedTarget, match="olmo2 is none of llama"):
        from_module(make_model("olmo2", torch.float32), None, "olmo2", 8, lambda: None)
    with pytest.raises(UnsupportedTarget, match="head size 8"):
        from_module(make_model("llama", torch.float32), None, "llama", 8, lambda: None)
