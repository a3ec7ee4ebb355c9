"""Drafter folders are read as they are, and the drafters guess the trees that redrafter's torch drafters guess."""

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from conftest import to_mlx, to_numpy
from mlx.utils import tree_flatten

from redrafter.config import RuleConfig, SamplingParams
from redrafter.config import Shape as TorchShape
from redrafter.core.accept import Accepted
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.drafters import checkpoint as torch_checkpoint
from redrafter.drafters.ngram import NgramDrafter as TorchNgramDrafter
from redrafter.drafters.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentNet
from redrafter.drafters.with_ngrams import WithNgrams
from redrafter.interop import apple
from redrafter.targets import load_target
from redrafter_mlx import checkpoint, drafter, noise
from redrafter_mlx.beam import Search
from redrafter_mlx.config import Shape
from redrafter_mlx.errors import CorruptCheckpoint, DrafterMismatch, ModelNotFound
from tests.helpers.zoo import PROMPTS, VOCAB, make_model

VARIANTS = {
    "rnn": {"layers": (-1,), "state_size": 32, "exit_size": 40},
    "gated-memory-tied": {
        "layers": (1, -1), "state_size": 48, "exit_size": 24, "cell": "gated", "first_state": "context",
        "head": "tied", "normed": True, "memory_heads": 3, "memory_size": 8, "draft_vocab_size": 20,
    },
    "zero-memory": {"layers": (0,), "state_size": 20, "exit_size": 36, "first_state": "zero", "memory_heads": 2},
    "none-unprojected": {"layers": (-1,), "state_size": 32, "exit_size": 64, "cell": "none", "blocks": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(dtype=torch.float32))


def make_net(target, variant):
    options = VARIANTS[variant]
    torch.manual_seed(1)
    layers = options["layers"]
    sizes = {"vocab_size": VOCAB, "embedding_size": 32, "context_size": target.hidden_size * len(layers)}
    net = RecurrentNet(RecurrentConfig(**sizes, **options))
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    if net.token_ids is not None:
        net.token_ids.copy_(torch.randperm(VOCAB)[: len(net.token_ids)].sort().values)
    return net.eval()


def bound(net, target, ngrams):
    """The MLX drafter over the torch target's own embeddings."""
    inputs = to_mlx(target.input_embedding.weight.detach())
    outputs = to_mlx(target.output_embedding.weight.detach())
    rows = outputs if net.token_ids is None else outputs[net.token_ids]
    return drafter.RecurrentDrafter(net, lambda ids: inputs[ids], lambda x: x @ rows.T, ngrams)


def step_through(oracle, own, target, temperature, same, shape):
    """Drafts of both along the same random text; what is accepted comes from outside."""
    generator = torch.Generator().manual_seed(4)
    prompts = [list(p) for p in PROMPTS]
    width = len(oracle.layers) * target.hidden_size
    lengths = torch.tensor([len(p) for p in prompts])
    longest = int(lengths.max())
    tokens = torch.tensor([p + [0] * (longest - len(p)) for p in prompts])
    hidden = torch.randn(len(prompts), longest, width, generator=generator)
    slots = 120
    state = oracle.begin(tokens, lengths, hidden, slots)
    mine = own.begin(prompts, to_mlx(hidden[:, : longest - 1]))
    texts = prompts
    seeds = torch.arange(len(prompts))
    params = SamplingParams(temperature=temperature)
    rule = make_rule(RuleConfig(), TorchShape(**vars(shape)), VOCAB, torch.float32)
    drafted = 0
    for step in range(5):
        count = torch.randint(1, 5, (len(prompts),), generator=generator) if step else torch.ones(5, dtype=torch.long)
        new = torch.randint(4, (len(prompts), 4), generator=generator)  # few tokens: n-grams match
        states = torch.randn(len(prompts), 4, width, generator=generator)
        none = torch.zeros_like(new)
        state = oracle.advance(state, Accepted(none, new, count, none[:, 0], none[:, 0]), states)
        gained = [new[i, : int(c)].tolist() for i, c in enumerate(count)]
        mine = own.advance(mine, gained, to_mlx(states))
        texts = [text + more for text, more in zip(texts, gained, strict=True)]
        lengths = lengths + count
        last = new.gather(1, count[:, None] - 1)[:, 0]
        sampling = Sampling.of([params] * len(prompts), VOCAB, "cpu")
        found = oracle.draft(state, last, rule.search(sampling, seeds, lengths - 1))
        ahead = lengths[:, None] + torch.arange(shape.length + 1)
        drawn = noise.gumbel(noise.as_seeds(seeds.tolist()), to_mlx(ahead), VOCAB) if temperature else None
        guessed = own.draft(mine, texts, Search(shape, temperature, drawn))
        drafted += int(found.valid.sum()) - len(prompts)
        if guessed.nodes:
            for name in ("tokens", "parents", "depths", "valid", "mask"):
                same(np.where(*masked(guessed, name)), np.where(*masked(found, name)))
        else:
            assert not found.valid[:, 1:].any()
    assert drafted > 20
    rows = torch.tensor([3, 0])
    kept = own.draft(own.keep(mine, [3, 0]), [texts[3], texts[0]], Search(shape, 0.0, None))
    alone = oracle.draft(
        oracle.keep(state, rows), last[rows], rule.search(Sampling.of([SamplingParams()] * 2, VOCAB, "cpu"), rows, rows)
    )
    same(np.where(*masked(kept, "tokens")), np.where(*masked(alone, "tokens")))


def masked(tree, name):
    """Empty nodes have no meaning: zeros in both."""
    valid, value = to_numpy(tree.valid), to_numpy(getattr(tree, name))
    return (valid if value.ndim == 2 else valid[..., None]), value, 0


@pytest.mark.parametrize(
    ("variant", "temperature", "ngrams"),
    [(v, t, n) for i, v in enumerate(VARIANTS) for t, n in ((0.0, i % 2 == 0), (1.0, i % 2 == 1))],
)
def test_drafts(variant, temperature, ngrams, target, tmp_path, same):
    net = make_net(target, variant)
    torch_checkpoint.write(tmp_path, net, target)
    read, made_for = checkpoint.read(tmp_path)
    assert made_for == torch_checkpoint.identity(target)
    oracle = RecurrentDrafter(net, target)
    oracle = WithNgrams(oracle) if ngrams else oracle
    own = bound(read, target, ngrams)
    step_through(oracle, own, target, temperature, same, Shape(width=3, length=3, nodes=6))


def test_int8_folders(target, tmp_path, same):
    net = make_net(target, "gated-memory-tied")
    torch_checkpoint.write(tmp_path, net, target, storage="int8")
    whole, _ = torch_checkpoint.read(tmp_path)
    read, _ = checkpoint.read(tmp_path)
    weights = dict(tree_flatten(read.parameters()))
    for name, tensor in whole.state_dict().items():
        same(weights[name], tensor, atol=0)
    step_through(
        RecurrentDrafter(whole, target), bound(read, target, False), target, 0.0, same, Shape(width=2, length=3)
    )


@pytest.mark.parametrize("exit_size", [64, 40])
def test_apples_folders(exit_size, target, tmp_path, same):
    """A random drafter in Apple's published layout guesses as redrafter's torch reader of that layout does."""
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCAB, "embedding_size": 32, "context_size": 32, "state_size": 32}
    net = RecurrentNet(RecurrentConfig(**sizes, exit_size=exit_size, first_state="zero")).eval()
    apple.write(tmp_path, net)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "recurrent_drafting_drafter"
    read, made_for = checkpoint.read(tmp_path)
    assert made_for == {}
    oracle = RecurrentDrafter(apple.read(tmp_path), target)
    step_through(oracle, bound(read, target, False), target, 1.0, same, Shape(width=3, length=3))


def test_ngrams_alone(target, same):
    step_through(TorchNgramDrafter(), drafter.NgramDrafter(), target, 0.0, same, Shape(width=1, length=5))


def test_the_identity_of_a_target(target):
    weight = target.output_embedding.weight.detach()
    rows = weight[:: max(1, len(weight) // 64)].numpy()
    own = checkpoint.identity(None, rows)
    assert own["signs"] == torch_checkpoint.identity(target)["signs"]
    with pytest.raises(DrafterMismatch, match="tokenizer"):
        checkpoint.compare({"tokenizer": "a"}, {"tokenizer": "b", "signs": ""}, "the drafter", "t")


def test_wrong_folders(target, tmp_path):
    with pytest.raises(ModelNotFound, match="no drafter folder"):
        checkpoint.read(tmp_path / "nowhere")
    with pytest.raises(CorruptCheckpoint, match=r"no config\.json"):
        checkpoint.read(tmp_path)
    torch_checkpoint.write(tmp_path, make_net(target, "rnn"), target)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptCheckpoint, match="cannot read"):
        checkpoint.read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole)
    for change, message in (
        ({"state_size": 31}, "does not fit"),
        ({"cell": "lstm"}, "does not describe"),
        ({"colour": 1}, "does not describe"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"drafter": config["drafter"] | change}))
        with pytest.raises(CorruptCheckpoint, match=message):
            checkpoint.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CorruptCheckpoint, match="no recurrent drafter"):
        checkpoint.read(tmp_path)


def test_fewer_tokens_are_guessed_than_were_learned():
    net, _ = checkpoint.read(next(checkpoint.SHIPPED.iterdir()))
    ids = net.token_ids.tolist()
    net.guess_first(len(ids))
    assert net.token_ids.size == len(ids)
    net.guess_first(100)
    assert (net.token_ids.tolist(), net.config.draft_vocab_size) == (ids[:100], 100)
    older, _ = checkpoint.read(next(checkpoint.SHIPPED.iterdir()))
    older.token_ids = mx.array(sorted(ids))  # in no order of frequency
    older.guess_first(100)
    assert older.token_ids.size == len(ids)


def test_the_shipped_drafter_is_found_by_its_target():
    config = json.loads(next(checkpoint.SHIPPED.glob("*/config.json")).read_text())["target"]
    assert checkpoint.find_shipped(config, quantised=False) is not None
    assert checkpoint.find_shipped(config | {"signs": "other"}, quantised=False) is None
    assert checkpoint.find_shipped(config | {"signs": "other"}, quantised=True) is not None
    assert checkpoint.find_shipped(config | {"tokenizer": "other"}, quantised=True) is None
