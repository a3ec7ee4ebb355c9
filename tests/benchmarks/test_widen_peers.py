"""Medusa's and EAGLE's twins for a widened target guess what the small ones guess."""

import pytest
import torch

from benchmarks.widen import LlamaShape, widen
from benchmarks.widen.drafter import STEP
from benchmarks.widen.peers import parameters_read, read_by_medusa, widen_eagle, widen_medusa
from redrafter import Engine, Shape
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError, DrafterMismatch
from redrafter.targets import load_target
from redrafter.tuning.simulate import simulate
from tests.helpers.toys import make_texts
from tests.helpers.zoo import PROMPTS, make_model, peer_drafter

WIDE = LlamaShape(hidden=96, layers=4, heads=6, kv_heads=6, mlp=80)
SHAPE = Shape(width=4, length=4, nodes=9)
BUDGET = 1_000_000


@pytest.fixture(scope="module")
def pair():
    model = make_model()
    return load_target(model), load_target(widen(model, WIDE))


def twin(kind, drafter, target):
    return widen_medusa(drafter, target, BUDGET) if kind == "medusa" else widen_eagle(drafter, target)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_the_guesses_are_those_of_the_small_drafter(pair, kind):
    small, wide = pair
    drafter = (
        peer_drafter(kind, small, draft_vocab_size=30, blocks=2) if kind == "medusa" else peer_drafter(kind, small)
    )
    large = twin(kind, drafter, wide)
    assert parameters_read(large) > 2 * parameters_read(drafter)
    texts = make_texts(small, temperature=1.0)
    found = [simulate(t, d, texts, SHAPE) for t, d in ((small, drafter), (wide, large))]
    assert found[0] == found[1]
    assert found[0].tokens_per_step > 1.1, "else nothing was guessed"
    plain, own = (Engine(wide, d, shape=SHAPE).generate(PROMPTS, max_new_tokens=12) for d in (NoDrafter(), large))
    assert [c.tokens for c in plain] == [c.tokens for c in own]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("medusa", "heads.0.into"),
        ("medusa", "heads.1.out"),
        ("eagle", "fuse"),
        ("eagle", "blocks.0.up"),
        ("eagle", "blocks.0.value"),
    ],
)
def test_the_guesses_twin(pair, kind, part):
    """Wrongly scaled or leaking weights are noticed."""
    small, wide = pair
    drafter = peer_drafter(kind, small)
    large = twin(kind, drafter, wide)
    with torch.no_grad():
        large.net.get_submodule(part).weight.mul_(1.5)
    texts = make_texts(small, temperature=1.0)
    assert simulate(small, drafter, texts, SHAPE) != simulate(wide, large, texts, SHAPE)


def test_medusa_is_as_large_as_its_budget(pair):
    small, wide = pair
    large = widen_medusa(peer_drafter("medusa", small), wide, BUDGET)
    assert parameters_read(large) == read_by_medusa(large.net.config) <= BUDGET
    assert large.net.config.exit_size % STEP == 24 % STEP
    with pytest.raises(ConfigError, match="too many"):
        widen_medusa(peer_drafter("medusa", small), wide, 100)


def test_refusals(pair):
    small, wide = pair
    with pytest.raises(DrafterMismatch, match="no widened target"):
        widen_eagle(peer_drafter("eagle", small), small)
    deep = peer_drafter("medusa", small, layers=(1, -1), context_size=64)
    with pytest.raises(DrafterMismatch, match="last hidden state"):
        widen_medusa(deep, wide, BUDGET)
