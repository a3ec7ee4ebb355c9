"""Sampling parameters of requests to SGLang: texts are those that redrafter's own engine samples."""

from types import SimpleNamespace

import pytest
import torch

from redrafter import Engine
from redrafter.drafters.none import NoDrafter
from redrafter.interop.sglang import plugin
from redrafter.interop.sglang.sampling import adjusted, seed_of
from redrafter.targets import load_target
from tests.helpers import sglang_engine
from tests.helpers import sglang_stub as stub
from tests.helpers.sglang_worker import make_worker
from tests.helpers.zoo import PROMPTS, make_model

FILTERS = ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.7}, {})


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


def asked(**changes) -> sglang_engine.Params:
    return sglang_engine.Params(**({"temperature": 1.0, "sampling_seed": 5} | changes))


@pytest.mark.parametrize("slots", [1, 5])
def test_filters(target, monkeypatch, slots):
    """Requests with and without top-k, top-p and min-p, each alone and all in one batch."""
    made = make_worker(target, monkeypatch, adaptive=False)
    run = sglang_engine.Engine(made, slots=slots)
    run.waiting = [sglang_engine.Req(f"request-{i}", PROMPTS[i], asked(**given), 8) for i, given in enumerate(FILTERS)]
    requests = list(run.waiting)
    run.finish()
    engine, unfiltered = Engine(target, NoDrafter()), []
    for req, given in zip(requests, FILTERS, strict=True):
        common = {"temperature": 1.0, "seed": 5, "max_new_tokens": 8}
        assert req.output_ids == engine.generate(req.origin_input_ids, **common, **given).tokens, given
        unfiltered.append(engine.generate(req.origin_input_ids, **common).tokens == req.output_ids)
    assert unfiltered == [False] * 4 + [True], "the twin: each filter matters"


def test_penalties_and_biases_are_the_same_for_every_node_of_a_request():
    """Penalties by repetition divide logits above zero and multiply those below."""
    logits = torch.randn(2, 3, 4)
    more, scale, bias = torch.randn(2, 4), 1 + torch.rand(2, 4), torch.randn(2, 4)
    fields = {"acc_additive_penalties": more, "acc_scaling_penalties": scale, "logit_bias": bias}
    found = adjusted(logits.flatten(0, 1), SimpleNamespace(**fields), 3).view(2, 3, 4)
    for row in range(2):
        for node in range(3):
            penalised = logits[row, node] + more[row]
            penalised = torch.where(penalised > 0, penalised / scale[row], penalised * scale[row])
            torch.testing.assert_close(found[row, node], penalised + bias[row])
    none = SimpleNamespace(**dict.fromkeys(fields))
    assert torch.equal(adjusted(logits.flatten(0, 1), none, 3), logits.flatten(0, 1))


def test_seeds():
    """A request's own, whatever its size; else one made from its name."""

    def seed(name: str, given: int | None) -> int:
        return seed_of(SimpleNamespace(rid=name, sampling_params=SimpleNamespace(sampling_seed=given)))

    assert [seed("a", x) for x in (0, 7, -1, 2**64 - 1)] == [0, 7, -1, -1]
    assert seed("a", None) == seed("a", None) != seed("b", None)
    torch.tensor([seed("a", 2**63 + 5), *(seed(str(i), None) for i in range(20))], dtype=torch.long)


def test_plain_decoding_under_the_same_rule(target, monkeypatch):
    """`--sampling-backend redrafter` without speculation: the sampler chooses every token by the request's seed."""
    stub.install(monkeypatch)
    plugin.register()
    plugin.register()  # as in a process that SGLang loads plug-ins in twice
    own = stub.TargetWorker(target.model)
    own.model_runner.sampler = stub.SAMPLERS["redrafter"]()
    engine = Engine(target, NoDrafter())
    for seed, prompt in enumerate(PROMPTS[:2]):
        req, run = sglang_engine.Req("a", prompt, asked(sampling_seed=seed), 8), sglang_engine.Engine(None)
        while not req.finished:
            text = prompt + req.output_ids
            batch = run._batch(stub.ForwardMode.EXTEND, [req], [len(text)])
            output = SimpleNamespace(next_token_logits=own.run([text])[0][:, -1])
            chosen = own.model_runner.sampler(output, batch.sampling_info, False, [], [], batch.seq_lens - 1)
            req.output_ids.append(int(chosen))
        assert req.output_ids == engine.generate(prompt, temperature=1.0, seed=seed, max_new_tokens=8).tokens


def test_scores_alone_choose_nothing(target, monkeypatch):
    """SGLang asks a sampler for log-probabilities without choosing: there are no positions then, or stale ones."""
    stub.install(monkeypatch)
    plugin.register()
    sampler = stub.SAMPLERS["redrafter"]()
    batch = sglang_engine.Engine(None)._batch(
        stub.ForwardMode.EXTEND, [sglang_engine.Req("a", PROMPTS[0], asked(sampling_seed=1), 8)], [len(PROMPTS[0])]
    )
    few, many = torch.zeros(1, 50), torch.zeros(7, 50)
    assert sampler._preprocess_logits(few, batch.sampling_info) is few, "before the first choice"
    output = SimpleNamespace(next_token_logits=few)
    sampler(output, batch.sampling_info, False, [], [], batch.seq_lens - 1)
    monkeypatch.setattr("redrafter.interop.sglang.sampler.choose", lambda *_: pytest.fail("chosen by stale positions"))
    assert sampler._preprocess_logits(many, batch.sampling_info) is many, "after a choice for fewer rows"
