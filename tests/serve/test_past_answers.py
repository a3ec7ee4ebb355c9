"""Remembered answers: who asks again is answered in fewer steps, in the same words; nobody copies from another's."""

import json
import random
import tracemalloc
import urllib.request
from typing import Any

import pytest

from redrafter import Engine, RuleConfig, Shape
from redrafter.drafters import NgramDrafter, NoDrafter, WithNgrams
from redrafter.drafters.with_ngrams import LONGEST
from redrafter.engine.request import Request
from redrafter.errors import ConfigError
from redrafter.planning.copying import MOST_COPIED
from redrafter.planning.steps import FixedSteps
from redrafter.runtime.batch import Batch
from redrafter.serve.batches import make_batch
from redrafter.serve.config import ServeConfig
from redrafter.serve.model import Served
from redrafter.serve.past_answers import ENTRY, TOKEN, PastAnswers, size
from redrafter.serve.scheduler import Limits, Scheduler
from redrafter.serve.server import build, build_planned
from redrafter.targets import Target
from tests.helpers.letters import make_target
from tests.helpers.scheduling import AnyPolicy, jobs_of, run
from tests.helpers.serving import NAME, running, wait_until
from tests.helpers.zoo import VOCAB, recurrent_drafter

SHAPE = Shape(width=3, length=4, nodes=9)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "stop": "b"},
    {"temperature": 1.0, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def requests(target: Target, count: int = 12) -> list[Request]:
    chance, plain = random.Random(0), Engine(target, NoDrafter())
    made = []
    for i in range(count):
        prompt = [chance.randrange(VOCAB - 3) for _ in range(chance.randint(1, 30))]
        made += plain.requests([prompt], max_new_tokens=chance.randint(20, 40), seed=i, **KINDS[i % len(KINDS)])
    return made


def make(target: Target, how: str, room: int | None = 100_000) -> Scheduler:
    """eager, recorded: the n-grams of a batch's tensors; ngram: the same alone; policy: those of the host."""
    past = None if room is None else PastAnswers(room)
    inner = recurrent_drafter(target, memory_heads=2, memory_size=8)
    drafter = {"policy": inner, "ngram": NgramDrafter()}.get(how) or WithNgrams(inner)
    shapes = [SHAPE, Shape(width=1, length=MOST_COPIED)]
    recorded = how == "recorded"
    batch = Batch(target, drafter, rows=4, context=90, kept=2, past=90, shapes=shapes, recorded=recorded)
    policy = AnyPolicy() if how == "policy" else FixedSteps(SHAPE)
    return Scheduler(batch, policy, Limits(queue=500), past)


def answers(scheduler: Scheduler, every: list[Request], owner: str = "Ada", **options: Any) -> tuple[Any, int]:
    """The tokens of each answer, and the steps of all."""
    group = jobs_of(scheduler.batch.target, every, owner=owner, **options)
    scheduler.submit([job for job, _ in group])
    run(scheduler, 5000)
    assert all(heard.last is not None and heard.last.error is None for _, heard in group)
    return [heard.tokens for _, heard in group], sum(job.writer.stats.steps for job, _ in group)


@pytest.mark.parametrize("how", ["eager", "recorded", "ngram", "policy"])
def test_the_same_texts_in_fewer_steps(target: Target, how: str) -> None:
    every = requests(target)
    alone = [c.tokens for c in Engine(target, NoDrafter()).complete(every)]
    scheduler = make(target, how)
    first, steps = answers(scheduler, every)
    again, fewer = answers(scheduler, every)
    assert first == again == alone
    assert scheduler.metrics.recalled == len(every)
    if how != "policy":  # which steps copy is random there
        assert fewer < 0.6 * steps
    assert answers(make(target, how, room=None), every)[0] == alone


@pytest.mark.parametrize("how", ["eager", "recorded", "ngram", "policy"])
def test_wrong_answers_in_the_store_change_nothing(target: Target, how: str) -> None:
    """Whatever is remembered, for rows that join and leave: texts that go wrong, other texts, one token for ever."""
    every, chance = requests(target), random.Random(1)
    alone = [c.tokens for c in Engine(target, NoDrafter()).complete(every)]
    scheduler = make(target, how)
    assert scheduler.past is not None
    for i, (request, text) in enumerate(zip(every, alone, strict=True)):
        wrong = [t if chance.random() < 0.7 else chance.randrange(VOCAB) for t in text]
        wrong = [wrong, list(range(VOCAB)), [text[0]] * 50, [*text, 1, 2, 3]][i % 4]
        scheduler.past.add("Ada", request.prompt, wrong)
    assert answers(scheduler, every)[0] == alone
    assert scheduler.metrics.recalled == len(every)


def test_another_owner_copies_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    every = requests(target)
    expected = answers(make(target, "eager", room=None), every)
    scheduler = make(target, "eager")
    answers(scheduler, every, "Ada")
    assert answers(scheduler, every, "Bob") == expected, "as many steps as without a store"
    assert answers(scheduler, every, "Ada", remembers=False) == expected
    assert scheduler.metrics.recalled == 0
    whole = PastAnswers.text
    monkeypatch.setattr(PastAnswers, "text", lambda self, owner, prompt: whole(self, "Ada", prompt))
    twin = answers(scheduler, every, "Cyd")
    assert twin[0] == expected[0]
    assert twin[1] < expected[1], "a store that ignores its owners would have been seen"


def test_only_finished_answers_are_remembered(target: Target) -> None:
    scheduler = make(target, "eager")
    assert scheduler.past is not None
    request = requests(target)[0]
    ((cancelled, _), (failed, _)) = jobs_of(target, [request] * 2, owner="Ada")
    failed.listener = lambda event: 1 / 0
    scheduler.submit([cancelled, failed])
    for _ in range(3):
        scheduler.turn()
    scheduler.cancel([cancelled])
    run(scheduler)
    assert scheduler.metrics.finished.keys() == {"cancelled", "failed"}
    assert not scheduler.past.kept


def test_room_and_order() -> None:
    past = PastAnswers(room=4 * size([9] * 4))
    for i in range(4):
        past.add("Ada", [i], [9] * 4)
    assert past.bytes == past.room
    assert past.text("Ada", [0]), "asked for: not the oldest any more"
    past.add("Bob", [0], [8] * 4)
    assert [past.text("Ada", [i])[1:] for i in range(4)] == [[9] * 4, [], [9] * 4, [9] * 4]
    assert past.text("Bob", [0]) == [0, 8, 8, 8, 8]
    past.add("Ada", [3], [9, 9])  # a beginning of what is known
    assert past.text("Ada", [3]) == [3, 9, 9, 9, 9]
    past.add("Ada", [3], [9, 7])
    assert past.text("Ada", [3]) == [3, 9, 7]
    assert past.bytes == past.room - 2 * TOKEN
    past.add("Ada", [5], [0] * past.room)
    assert (past.bytes, len(past.kept)) == (0, 0), "an answer without room is not kept"
    assert PastAnswers(1000).text("Ada", [1]) == []
    past.add("Ada", list(range(10)), [50])
    assert past.text("Ada", list(range(10))) == [*range(10 - LONGEST, 10), 50]


@pytest.mark.parametrize("length", [0, 1, 50, 1000])
def test_bytes_are_those_of_the_memory(length: int) -> None:
    """Owners and prompts of any length; the vocabulary's tokens are no small numbers, which Python keeps anyway."""
    past = PastAnswers(room=2**20)
    tracemalloc.start()
    for i in range(6000):
        past.add("Ada" * 20_000, [i] * 100, [50_000 + i] * length)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(past.kept) == past.room // (ENTRY + TOKEN * length)
    assert 0.5 * past.bytes < used < 1.05 * past.room


def make_served(target: Target, adapts: bool = False, rule: RuleConfig | None = None, **changes: Any) -> Served:
    engine = Engine(target, WithNgrams(recurrent_drafter(target)), shape=SHAPE, adapts=adapts, rule=rule)
    config = ServeConfig(**({"rows": 4, "context": 90, "name": NAME, "remember_answers": 10_000} | changes))
    if adapts:
        return build_planned(engine, config)
    return build(engine, make_batch(engine, config, [SHAPE]), FixedSteps(SHAPE), config)


def post(url: str, path: str = "/v1/completions", key: str | None = None, **asked: Any) -> Any:
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    body = {"model": NAME, "temperature": 0} | asked
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers), timeout=30
    ) as response:
        text = response.read().decode()
        return text if asked.get("stream") else json.loads(text)


@pytest.mark.parametrize("adapts", [False, True], ids=["shape", "adaptive"])
def test_over_http_each_key_has_its_own(target: Target, adapts: bool) -> None:
    served = make_served(target, adapts)
    metrics, text = served.scheduler.metrics, {"prompt": "hello", "max_tokens": 40}
    with running(served) as url:

        def recalls(**options: Any) -> int:
            before = metrics.recalled
            found = post(url, **text | options)
            assert found["choices"][0]["text"] == first["choices"][0]["text"]
            return metrics.recalled - before

        first = post(url, **text, key="one")
        assert [recalls(key=key) for key in ("one", "two", "one", "two", None, None)] == [1, 0, 1, 1, 0, 1]
        assert recalls(key="one", store=False) == 0
        assert recalls(key="one", trace=True) == 0, "a trace would show it"
        assert recalls(key="one", speculative=False) == 0
        with urllib.request.urlopen(f"{url}/metrics") as response:
            lines = response.read().decode().splitlines()
        assert f"redrafter_answers_recalled_total {metrics.recalled}" in lines
        assert f"redrafter_remembered_bytes {3 * size([0] * 40)}" in lines, "three keys, 40 tokens each"


def test_over_http_store_false_is_forgotten(target: Target) -> None:
    served = make_served(target)
    past = served.scheduler.past
    assert past is not None
    with running(served) as url:
        post(url, prompt="abc", store=False)
        post(url, prompt="abc", stream=True, trace=True)
        post(url, "/v1/responses", input="abc", max_output_tokens=5, store=False)
        post(url, "/v1/responses", input="abc", max_output_tokens=6, store=True)
        assert wait_until(lambda: past.kept), "a client may hear of its answer first"
        assert [len(answer) for answer in past.kept.values()] == [6], "the last answer alone"


def test_off_by_default_and_refused_where_it_cannot_work(target: Target) -> None:
    assert make_served(target, remember_answers=0).scheduler.past is None
    assert ServeConfig().remember_answers == 0
    with pytest.raises(ConfigError, match="remember_answers must be at least 0"):
        ServeConfig(remember_answers=-1)
    with pytest.raises(ConfigError, match="rule seeded, got typical"):
        make_served(target, rule=RuleConfig(name="typical"))
    engine = Engine(target, recurrent_drafter(target), shape=SHAPE)
    config = ServeConfig(rows=2, context=90, remember_answers=1000)
    with pytest.raises(ConfigError, match=r"add \+ngram"):
        build(engine, make_batch(engine, config, [SHAPE]), FixedSteps(SHAPE), config)
