"""Models in GGUF files: the logits of transformers from the same file, errors of one line, texts of plain decoding."""

import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import redrafter
from redrafter.errors import ConfigError, CorruptCheckpoint, ModelNotFound, UnsupportedTarget
from redrafter.kernels.cpu import library
from redrafter.targets import Target, load_target
from redrafter.targets.cpu.packed_target import PackedTarget
from redrafter.targets.gguf.tokenizer import tokenizer_of
from tests.targets.gguf.test_blocks import random_bytes, write
from tests.targets.gguf.test_tokenizer import make as write_tokenizer

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")

Kind = gguf.GGMLQuantizationType
HIDDEN, MIDDLE, TOKENS = 256, 512, 64
HEADS = {"qwen3": (2, 1, 128), "gemma3": (2, 1, 256)}
"""Query heads, key heads and head size. transformers assumes its default head sizes for these architectures."""
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def matrix(rows, columns, kind, seed):
    """Random weights of a sensible size in a type."""
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
    if "_K" not in kind:
        return gguf.quants.quantize(weights, Kind[kind]), Kind[kind]
    data = random_bytes(Kind[kind], rows, columns, seed).reshape(-1, {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind])
    scale = np.float16(2e-4).tobytes()
    for at in (208,) if kind == "Q6_K" else (0, 2):  # this package does not quantise to these types: random bits
        data[:, at : at + 2] = np.frombuffer(scale, np.uint8)
    return data.reshape(rows, -1), Kind[kind]


def make_file(path, architecture="llama", kind="Q4_1", *, without=(), extra=(), metadata=(), **changes):
    """`extra`: tensors by name, or the lengths of vectors; `metadata`: entries that are not the architecture's."""
    heads, kv_heads, size = HEADS.get(architecture, (8, 4, 32))
    hidden, width, kv_width = HIDDEN, heads * size, kv_heads * size
    tensors = {"token_embd.weight": matrix(TOKENS, hidden, kind, 1)}
    for i in range(2):
        for n, (name, rows, columns) in enumerate(
            [
                *[("attn_q", width, hidden), ("attn_k", kv_width, hidden), ("attn_v", kv_width, hidden)],
                *[("attn_output", hidden, width), ("ffn_gate", MIDDLE, hidden), ("ffn_up", MIDDLE, hidden)],
                ("ffn_down", hidden, MIDDLE),
            ]
        ):
            tensors[f"blk.{i}.{name}.weight"] = matrix(rows, columns, kind, 10 * i + n + 2)
        norms = {"attn_norm": hidden, "ffn_norm": hidden}
        if architecture in ("qwen3", "gemma3"):
            norms |= {"attn_q_norm": size, "attn_k_norm": size}
        if architecture == "gemma3":
            norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
        for name, count in norms.items():
            tensors[f"blk.{i}.{name}.weight"] = (np.linspace(0.5, 1.5, count, dtype=np.float32), Kind.F32)
        if architecture == "qwen2":
            for name, count in (("attn_q", width), ("attn_k", kv_width), ("attn_v", kv_width)):
                tensors[f"blk.{i}.{name}.bias"] = (np.linspace(-1, 1, count, dtype=np.float32), Kind.F32)
    tensors["output_norm.weight"] = (np.linspace(0.5, 1.5, hidden, dtype=np.float32), Kind.F32)
    fields = {
        **{"block_count": 2, "context_length": 512, "embedding_length": hidden, "feed_forward_length": MIDDLE},
        **{"attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": size},
        **{"attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0},
        **({"attention.sliding_window": 8} if architecture == "gemma3" else {}),
    }
    metadata = {"general.name": "tiny", "tokenizer.ggml.eos_token_id": 5, **dict(metadata)}
    metadata |= {f"{architecture}.{name}": value for name, value in (fields | changes).items()}
    for name, value in dict(extra).items():
        tensors[name] = (np.ones(value, np.float32), Kind.F32) if isinstance(value, int) else value
    return write(path, {k: v for k, v in tensors.items() if k not in without}, metadata, architecture)


def logits(target, ids):
    """With fp32 activations, as transformers has them."""
    if isinstance(target, PackedTarget):
        target.use_activations("fp32")
    from redrafter.core.cache import KVCache

    cache = KVCache(slots=ids.shape[1])
    positions = torch.arange(ids.shape[1])[None]
    visible = positions[:, None] <= positions[:, :, None]
    with torch.no_grad():
        return target.forward(ids, positions, positions, visible, positions, cache, ())[0]


def compare(path):
    target = load_target(path, device="cpu")
    assert isinstance(target, PackedTarget)
    own = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    ids = torch.randint(TOKENS, (1, 20))
    wanted = logits(Target(own), ids)
    assert float((logits(target, ids) - wanted).norm() / wanted.norm()) < 1e-5
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_every_type(tmp_path, kind):
    compare(make_file(tmp_path / "x.gguf", kind=kind))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_every_architecture(tmp_path, architecture):
    target = compare(make_file(tmp_path / "x.gguf", architecture, "Q8_0"))
    assert target.config.eos_token_id == [5]
    if architecture == "gemma3":
        assert target.attention.window == 8


def test_text_and_another_dtype(tmp_path):
    path = make_file(tmp_path / "tiny.gguf", kind="Q4_K")
    engine = redrafter.load(str(path), "ngram", device="cpu", exact="require")
    assert engine.target.name == "tiny"
    assert engine.eos_tokens() == (5,)
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    done, plain = (e.generate([1, 2, 3], **options) for e in (engine, engine.plain()))
    assert done.tokens == plain.tokens
    with pytest.raises(ConfigError, match="came without a tokenizer"):
        engine.generate("words")
    with pytest.raises(ConfigError, match="a GGUF file takes no 'device_map'"):
        load_target(path, device="cpu", device_map="auto")
    for dtype in (None, "fp32"):
        with pytest.raises(ModelNotFound, match=r"no file .*nothing.gguf"):
            load_target(tmp_path / "nothing.gguf", dtype=dtype, device="cpu")
    other = load_target(path, dtype="fp32", device="cpu")  # as transformers dequantises it
    assert not isinstance(other, PackedTarget)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.allclose(logits(other, ids), logits(engine.target, ids), atol=1e-4)


def test_decoding_imports_little_of_transformers(tmp_path, monkeypatch):
    """transformers' models and configurations, and the compilers that they import, take seconds to import."""
    compiled, cache = library.folder(), tmp_path / "cache"
    compiled.mkdir(parents=True, exist_ok=True)
    cache.mkdir()
    (cache / "native").symlink_to(compiled)  # compiling takes half a minute
    monkeypatch.setenv("REDRAFTER_CACHE", str(cache))
    model, words = make_file(tmp_path / "x.gguf", kind="Q4_1"), write_tokenizer(tmp_path / "words.gguf")
    assert tokenizer_of(words) is not None, "kept for the next start"
    program = f"""
import sys
import redrafter, redrafter.tuning.at_rest, redrafter.serve.server
from redrafter.targets.gguf.file import GGUFFile
from redrafter.targets.gguf.tokenizer import tokenizer_of
tokenizer = tokenizer_of(GGUFFile({str(words.path)!r}))
engine = redrafter.load({str(model)!r}, "ngram", device="cpu", tokenizer=tokenizer)
assert len(engine.generate([3, 4], max_new_tokens=4, ignore_eos=True).tokens) == 4
unwanted = ("transformers.modeling_utils", "transformers.models.llama", "torch._dynamo", "accelerate", "scipy")
assert not {{*unwanted}} & {{*sys.modules}}, {{*unwanted}} & {{*sys.modules}}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_model_in_transformers_is_the_same(tmp_path, architecture):
    """Also with what transformers' own reader of GGUF files drops: rope_freqs, scaled rotations, biases."""
    options = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    if architecture == "llama":
        options["extra"] = {
            "rope_freqs.weight": (np.linspace(1, 8, 16, dtype=np.float32), Kind.F32),
            "blk.1.attn_q.bias": (np.linspace(-1, 1, 256, dtype=np.float32), Kind.F32),
        }
    path = make_file(tmp_path / "x.gguf", architecture, "Q8_0", **options)
    ids = torch.arange(20)[None]
    ours, theirs = (logits(load_target(path, device="cpu", dtype=dtype), ids) for dtype in (None, "fp32"))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    if architecture != "gemma3":
        plain = logits(load_target(make_file(path, architecture, "Q8_0"), device="cpu"), ids)
        assert float((ours - plain).norm() / plain.norm()) > 1e-3


def test_files_that_do_not_fit_are_one_line(tmp_path):
    path = tmp_path / "x.gguf"
    for error, words, options in (
        (UnsupportedTarget, "architecture 'rwkv7'; redrafter reads llama, qwen2", {"architecture": "rwkv7"}),
        (CorruptCheckpoint, "no tensor blk.1.ffn_up.weight", {"without": ["blk.1.ffn_up.weight"]}),
        (CorruptCheckpoint, "no tensor blk.0.attn_norm.weight", {"without": ["blk.0.attn_norm.weight"]}),
        (CorruptCheckpoint, "no tensor output_norm.weight", {"without": ["output_norm.weight"]}),
        (CorruptCheckpoint, "has the shape", {"feed_forward_length": 1024}),
        (CorruptCheckpoint, "llama.block_count is 0", {"block_count": 0}),
        (UnsupportedTarget, "scales its rotary embedding by 'longrope'", {"rope.scaling.type": "longrope"}),
        (
            UnsupportedTarget,
            "the head size 8 is no multiple of 16",
            {"attention.key_length": 8, "attention.value_length": 8},
        ),
        *[
            (CorruptCheckpoint, f"{name} has the shape", {"architecture": kind, "extra": {name: length}})
            for kind, name, length in (
                ("llama", "blk.1.attn_norm.weight", HIDDEN - 1),
                ("llama", "blk.0.ffn_norm.weight", 1),
                ("llama", "output_norm.weight", HIDDEN + 1),
                ("llama", "rope_freqs.weight", 15),
                ("llama", "blk.0.attn_q.bias", 32),
                ("qwen2", "blk.1.attn_k.bias", 1),
                ("qwen3", "blk.0.attn_q_norm.weight", 127),
                ("gemma3", "blk.0.post_ffw_norm.weight", 8),
            )
        ],
        *[
            (UnsupportedTarget, f"has the tensor {name}", {"architecture": kind, "extra": {name: 8}})
            for kind, name in (
                ("llama", "blk.0.ffn_down.bias"),
                ("llama", "blk.7.attn_norm.weight"),
                ("llama", "blk.0.attn_q_norm.weight"),
                ("qwen3", "rope_freqs.weight"),
            )
        ],
        *[
            (CorruptCheckpoint, f"no tensor {name}", {"architecture": kind, "without": [name]})
            for kind, name in (("qwen3", "blk.1.attn_q_norm.weight"), ("qwen2", "blk.0.attn_v.bias"))
        ],
        (CorruptCheckpoint, "8 heads cannot share 3 key heads", {"attention.head_count_kv": 3}),
        (CorruptCheckpoint, "7 heads cannot share a hidden size of 256", {"attention.head_count": 7}),
        (CorruptCheckpoint, "epsilon is nan", {"attention.layer_norm_rms_epsilon": float("nan")}),
        (CorruptCheckpoint, "context_length is inf", {"context_length": float("inf")}),
        (CorruptCheckpoint, "context_length is 1.5", {"context_length": 1.5}),
        (CorruptCheckpoint, "claims 1000000 layers", {"block_count": 1_000_000}),
        (UnsupportedTarget, "rope.dimension_count = 16; redrafter needs", {"rope.dimension_count": 16}),
        (UnsupportedTarget, "attention.value_length = 16; redrafter needs", {"attention.value_length": 16}),
        (UnsupportedTarget, "needs a rope.scaling.type", {"rope.scaling.factor": 2.0}),
        *[
            (UnsupportedTarget, f"{name} = 3, which redrafter does not know", {name: 3})
            for name in ("rope.scale_linear", "rope.freq_base_swa", "logit_scale", "expert_count")
        ],
    ):
        with pytest.raises(error, match=words) as found:
            load_target(make_file(path, **options), device="cpu")
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_mutated_files_give_one_line_or_a_pass(tmp_path, architecture):
    """40 files with a few bytes changed: each runs one pass, or raises an error for users."""
    rng, path = np.random.default_rng(0), tmp_path / "x.gguf"
    whole = make_file(path, architecture, "Q8_0").read_bytes()
    header, ids = whole.index(b"output_norm.weight") + 50, torch.arange(3)[None]
    said, passed = [], 0
    for turn in range(40):
        content = bytearray(whole)
        first, last = (24, header) if turn % 4 else (header, len(whole))  # every fourth: weights, such as NaN
        for at in rng.integers(first, last, 1 if turn % 4 else 2000):
            content[at] = rng.choice([0, 1, 127, 255, int(rng.integers(0, 256))])
        path.write_bytes(content)
        try:
            assert logits(load_target(path, device="cpu"), ids).shape == (1, 3, TOKENS)
            passed += 1
        except (CorruptCheckpoint, UnsupportedTarget) as error:
            said.append(str(error))
    assert not any("\n" in text for text in said)
    assert passed >= 10
    assert len(said) >= 10
