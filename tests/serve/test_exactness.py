"""The server says what it promises: in its models, its metrics and in the usage of each answer."""

import json
import urllib.request
from typing import Any

import pytest

from redrafter import Engine, RuleConfig
from redrafter.engine import exactness
from redrafter.errors import NotExact
from redrafter.planning.steps import FixedSteps
from redrafter.serve.batches import make_batch
from redrafter.serve.config import ServeConfig
from redrafter.serve.server import build
from tests.helpers.letters import make_target
from tests.helpers.promises import promise_bitwise
from tests.helpers.serving import NAME, SHAPE, make_served, running
from tests.helpers.zoo import recurrent_drafter


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("promised", ["bitwise", "ties"])
def test_models_metrics_and_usage(monkeypatch, promised):
    """Also the twin of a server that ignores the promise: both values are told."""
    if promised == "bitwise":
        promise_bitwise(monkeypatch)
    with running(make_served()) as url:
        [model] = json.loads(ask(f"{url}/v1/models"))["data"]
        assert model["exactness"] == promised
        assert json.loads(ask(f"{url}/v1/models/{NAME}"))["exactness"] == promised
        lines = ask(f"{url}/metrics").splitlines()
        for name in ("bitwise", "ties"):
            assert f'redrafter_exactness{{promise="{name}"}} {int(name == promised)}' in lines
        done = json.loads(ask(f"{url}/v1/completions", {"model": NAME, "prompt": "ab", "n": 2}))
        assert done["usage"]["speculative"]["exactness"] == promised


def test_log_probabilities_keep_the_promise(monkeypatch):
    monkeypatch.setattr(exactness, "why_ties", lambda *a, **k: "")
    with running(make_served()) as url:
        assert json.loads(ask(f"{url}/v1/models"))["data"][0]["exactness"] == "bitwise"
        done = json.loads(ask(f"{url}/v1/completions", {"model": NAME, "prompt": "ab", "logprobs": 1}))
        assert done["usage"]["speculative"]["exactness"] == "bitwise"


def served(policy: FixedSteps, **options: Any) -> Any:
    target = make_target()
    engine = Engine(target, recurrent_drafter(target), shape=SHAPE, **options)
    config = ServeConfig(rows=2, context=90, name=NAME)
    return build(engine, make_batch(engine, config, [SHAPE]), policy, config)


def test_a_rule_without_a_promise():
    found = served(FixedSteps(SHAPE), rule=RuleConfig(name="typical"))
    assert found.promise.exactness is None


@pytest.mark.parametrize("reason", ["", "it rained"])
def test_require_refuses_a_server_whose_texts_may_differ(monkeypatch, reason):
    """Twin: without a reason to differ, it is served."""
    monkeypatch.setattr(exactness, "why_ties", lambda *a, **k: reason)
    if reason:
        with pytest.raises(NotExact, match="it rained"):
            served(FixedSteps(SHAPE), exact="require")
    else:
        assert served(FixedSteps(SHAPE), exact="require").promise.exactness == "bitwise"
