"""A draft model out of the target's first layers: it begins as them, learns, and is then an ordinary model."""

import pytest
import torch

import redrafter
from benchmarks.training import layer_drafter as layers
from redrafter.errors import ConfigError
from redrafter.targets import load_target
from tests.helpers.toys import make_texts
from tests.helpers.zoo import PROMPTS, make_model


@pytest.fixture(scope="module")
def target():
    return load_target(make_model("llama", torch.float32))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "qwen2-mixed"])
def test_it_begins_as_the_first_layers(kind):
    target = load_target(make_model(kind, torch.float32))
    short = layers.shorten(target, 1)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        theirs = target.model(ids, output_hidden_states=True).hidden_states[1]
        mine = short.base_model(ids, output_hidden_states=True).hidden_states
        assert len(mine) == 2
        norm = next(m for name, m in short.base_model.named_children() if name in ("norm", "ln_f"))
        torch.testing.assert_close(short.base_model(ids).last_hidden_state, norm(theirs))


@pytest.mark.parametrize("count", [0, 2, 7])
def test_as_many_layers_as_the_target_or_none_are_refused(target, count):
    with pytest.raises(ConfigError, match=f"layers must be in 1..1, got {count}"):
        layers.shorten(target, count)


def test_it_learns_and_is_a_draft_model(target, tmp_path):
    texts = make_texts(target, count=16)
    short = layers.shorten(target, 1)
    shared = short.get_input_embeddings().weight.clone()
    losses = []
    layers.distill(
        short,
        target,
        texts,
        updates=80,
        batch_size=8,
        lr=1e-2,
        report=lambda _, loss, same: losses.append((loss, same)),
    )
    (loss, same), (loss_then, same_then) = (torch.tensor(some).mean(0) for some in (losses[:5], losses[-5:]))
    assert loss_then < loss - 0.3, "the rest is the target's own entropy"
    assert same_then > same + 0.1
    assert torch.equal(short.get_input_embeddings().weight, shared), "the embeddings are the target's"
    short.save_pretrained(tmp_path)
    engine = redrafter.load(target.model, str(tmp_path), gamma="heuristic")
    done = engine.generate(PROMPTS, max_new_tokens=20)
    assert [c.tokens for c in done] == [c.tokens for c in engine.plain().generate(PROMPTS, max_new_tokens=20)]
    assert sum(c.stats.accepted for c in done) > 0


@torch.no_grad()
def test_only_what_the_target_wrote_is_learned(target):
    """Prompts and padding count for nothing: another padding, the same loss. Twin: all of it counted, another loss."""
    texts = make_texts(target, count=6)
    short = layers.shorten(target, 1)
    tokens, written = layers.batches(texts, 4, 64, seed=0)(0)
    assert not written[:, :3].any(), "the prompts"
    loss, _ = layers.compare(short, target, tokens, written)
    pad = (0, 5)
    wider = torch.nn.functional.pad(tokens, pad, value=9), torch.nn.functional.pad(written, pad)
    torch.testing.assert_close(layers.compare(short, target, *wider)[0], loss, atol=1e-4, rtol=1e-4)
    assert abs(float(layers.compare(short, target, tokens, torch.ones_like(written))[0] - loss)) > 1e-3
