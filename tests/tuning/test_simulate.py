"""Simulated tokens/step are those of real decoding."""

from dataclasses import replace

import pytest

from redrafter import Shape
from redrafter.drafters import NgramDrafter, NoDrafter, RecurrentDrafter, WithNgrams
from redrafter.engine import Engine
from redrafter.targets import Target
from redrafter.train.setup import make_net
from redrafter.tuning.simulate import simulate
from tests.helpers.toys import OPTIONS, make_texts
from tests.helpers.zoo import make_model


@pytest.mark.parametrize(("kind", "temperature"), [("llama", 1.0), pytest.param("gemma3", 0.0, marks=pytest.mark.slow)])
def test_simulated_tokens_per_step_are_the_engines(kind: str, temperature: float) -> None:
    target = Target(make_model(kind))
    texts = make_texts(target, temperature=temperature)
    shape = Shape(width=4, length=3, nodes=7)
    net = make_net(target, texts, OPTIONS, seed=1)
    own = RecurrentDrafter(net, target)
    for drafter in (own, WithNgrams(own), NgramDrafter(), NoDrafter()):
        found = simulate(target, drafter, texts, shape)
        engine = Engine(target, drafter, shape=shape)
        requests = [
            request
            for i in range(len(texts))
            for request in engine.requests(
                [texts.row(i)[:3].tolist()],
                max_new_tokens=20 - i % 5,
                seed=int(texts.seeds[i]),
                temperature=temperature,
            )
        ]
        done = engine.complete([replace(request, eos=(11,)) for request in requests])
        assert [c.tokens for c in done] == [texts.row(i)[3:].tolist() for i in range(len(texts))]
        steps = sum(c.stats.steps for c in done)
        tokens = sum(c.stats.tokens - 1 for c in done)
        assert (found.tokens, found.steps) == (tokens, steps)
    assert found.tokens_per_step == 1.0
