"""Continuous batching: every finished answer is the one it would be alone, and nobody pays for another's end."""

import gc
import random
import threading
import time
from typing import Any

import pytest
import torch

from redrafter import Engine
from redrafter.config import RuleConfig
from redrafter.drafters import ModelDrafter, NoDrafter
from redrafter.engine.request import Completion
from redrafter.errors import ConfigError
from redrafter.planning.steps import FixedSteps
from redrafter.runtime.batch import Batch
from redrafter.serve.job import Event, Job
from redrafter.serve.scheduler import Draining, QueueFull, Scheduler
from redrafter.targets import Target
from tests.helpers.letters import END, make_target
from tests.helpers.scheduling import SHAPES, AnyPolicy, Listener, jobs_of, make, run
from tests.helpers.zoo import VOCAB, recurrent_drafter

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "stop": "b"},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "stop": ["ab", "Ka"]},
    {"temperature": 0.7, "logit_bias": {3: 2.0, 5: -100.0}},
    {"temperature": 1.2, "n": 3},
]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def requests(engine: Engine, count: int, seed: int = 0) -> list[list[Any]]:
    chance = random.Random(seed)
    system = [chance.randrange(VOCAB) for _ in range(20)]
    made = []
    for i in range(count):
        own = [chance.randrange(VOCAB - 3) for _ in range(chance.randint(1, 30))]
        prompt = system + own if chance.random() < 0.5 else own
        options = KINDS[i % len(KINDS)] | {"max_new_tokens": chance.randint(1, 25), "seed": i}
        made.append(engine.requests([prompt], **options))
    return made


@pytest.fixture(scope="module")
def alone(target: Target) -> list[list[Completion]]:
    """What each of 64 groups of requests is answered when it comes alone."""
    plain = Engine(target, NoDrafter())
    return [[plain.complete([request])[0] for request in group] for group in requests(plain, 64)]


@pytest.mark.parametrize("how", ["exact", "buckets", "policy"])
def test_64_requests_at_once_with_cancels_write_what_each_writes_alone(
    target: Target, alone: list[list[Completion]], how: str
) -> None:
    """Mixed parameters, some plain, some with logprobs; a quarter is cancelled at any moment."""
    plain = Engine(target, NoDrafter())
    policy = AnyPolicy() if how == "policy" else None
    scheduler = make(target, recorded=how == "buckets", policy=policy)
    groups = requests(plain, 64)
    chance = random.Random(1)
    every = [
        jobs_of(target, g, drafts=chance.random() < 0.8, logprobs=2 if chance.random() < 0.1 else None) for g in groups
    ]
    scheduler.start()

    def client(group: list[tuple[Job, Listener]], wait: float, cancel: float | None) -> None:
        time.sleep(wait)
        scheduler.submit([job for job, _ in group])
        if cancel is not None:
            time.sleep(cancel)
            scheduler.cancel([job for job, _ in group])

    threads = []
    cancelled = set()
    for i, group in enumerate(every):
        cancel = chance.random() * 3 if chance.random() < 0.25 else None
        if cancel is not None:
            cancelled.add(i)
        threads.append(threading.Thread(target=client, args=(group, chance.random(), cancel)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + 60
    while not scheduler.idle and time.monotonic() < until:
        time.sleep(0.02)
    assert scheduler.idle, "something hangs"
    compared = 0
    for i, (group, mine, wanted) in enumerate(zip(groups, every, alone, strict=True)):
        for request, (job, heard), done in zip(group, mine, wanted, strict=True):
            if i in cancelled and not heard.done.is_set():
                continue
            assert heard.done.is_set()
            assert heard.last is not None
            assert heard.last.error is None
            assert heard.tokens == done.tokens, request
            assert heard.text == done.text
            assert job.writer.finish_reason == done.finish_reason
            compared += 1
    assert compared > 50
    assert scheduler.batch.free == scheduler.batch.rows
    if policy is not None:
        assert policy.planned == {"plain", "copied", "drafted"}
        assert not policy.planner.rows, "every row was closed"
    assert scheduler.batch.used == 0
    assert not scheduler.jobs
    assert not scheduler.reading
    assert not scheduler.queue
    ended = sum(scheduler.metrics.finished.values())
    assert ended == sum(map(len, groups)), "every answer ended in some way"
    other = "2x2:3" if policy is None else "copied"
    assert set(scheduler.metrics.steps) == {"3x3:9", other, "plain"}, "all kinds of steps were met"
    assert scheduler.metrics.reused_tokens > 0
    scheduler.stop()


def test_memory_returns_to_its_start(target: Target) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target)

    def serve(seed: int) -> int:
        for group in requests(plain, 12, seed):
            scheduler.submit([job for job, _ in jobs_of(target, group)])
        while not scheduler.idle:
            scheduler.turn()
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.layout is torch.strided]
        storages = [x.untyped_storage() for x in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    serve(1)
    assert serve(3) == serve(3)


class Fault:
    """A filter that raises once the text has grown."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 12:
            raise ValueError("a filter broke")
        return scores


@pytest.mark.parametrize("at", ["filter", "filter at once", "halts", "listener"])
def test_a_fault_in_one_row_fails_that_row_alone(target: Target, at: str) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target)
    groups = requests(plain, 5, seed=4)
    every = [jobs_of(target, g)[0] for g in groups]
    prompt = list(range(13 if at == "filter at once" else 8))

    def halts(ids: list[int]) -> bool:
        raise ValueError("a filter broke")

    request = plain.requests([prompt], max_new_tokens=20, seed=1, halts=halts if at == "halts" else None)
    bad, heard = jobs_of(target, request, processors=[Fault()] if "filter" in at else ())[0]
    if at == "listener":
        told: list[Event] = []

        def listener(piece: Event) -> None:
            told.append(piece)
            if piece.error is None:
                raise ValueError("a filter broke")

        bad.listener = listener
    for job in [*[j for j, _ in every[:3]], bad, *[j for j, _ in every[3:]]]:
        scheduler.submit([job])
    run(scheduler)
    last = told[-1] if at == "listener" else heard.last
    assert last is not None
    assert "a filter broke" in str(last.error)
    for group, (_, good) in zip(groups, every, strict=True):
        assert good.tokens == plain.complete([group[0]])[0].tokens
    assert scheduler.metrics.finished["failed"] == 1
    assert scheduler.batch.free == scheduler.batch.rows


def test_a_failed_step_fails_its_rows_and_serving_goes_on(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target)
    group = plain.requests([[1, 2, 3]], max_new_tokens=9, seed=1)
    (job, heard), (later, after) = jobs_of(target, group)[0], jobs_of(target, group)[0]
    scheduler.submit([job])
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "_collect", lambda self: (_ for _ in ()).throw(RuntimeError("no memory")))
        run(scheduler)
    assert heard.last is not None
    assert "no memory" in str(heard.last.error)
    scheduler.submit([later])
    run(scheduler)
    assert after.tokens == plain.complete(group)[0].tokens


def test_a_long_prompt_does_not_stall_others(target: Target) -> None:
    """While a prompt of 60 tokens is read, 8 at a time, the other row gains a token or more in every turn."""
    plain = Engine(target, NoDrafter())
    scheduler = make(target)
    short, heard = jobs_of(target, plain.requests([[1, 2]], max_new_tokens=40, seed=1, ignore_eos=True))[0]
    scheduler.submit([short])
    scheduler.turn()
    long, slow = jobs_of(target, plain.requests([list(range(36)) * 2], max_new_tokens=3, seed=1))[0]
    scheduler.submit([long])
    turns = 0
    while not slow.tokens:
        before = len(heard.tokens)
        scheduler.turn()
        turns += 1
        assert len(heard.tokens) > before or heard.done.is_set()
    assert turns >= 72 // 8


def test_reading_takes_turns(target: Target) -> None:
    """A short prompt behind a long one is not read last."""
    plain = Engine(target, NoDrafter())
    scheduler = make(target, idle_chunk=8)
    long, slow = jobs_of(target, plain.requests([list(range(36)) * 2], max_new_tokens=2, seed=1))[0]
    short, quick = jobs_of(target, plain.requests([[9, 8, 7]], max_new_tokens=2, seed=1))[0]
    scheduler.submit([long])
    scheduler.submit([short])
    for _ in range(4):
        scheduler.turn()
    assert quick.tokens
    assert not slow.tokens


def test_a_prefix_is_copied_from_rows_of_the_same_owner_only(target: Target) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target)
    prompt = list(range(30))
    alone = plain.complete(plain.requests([prompt], max_new_tokens=5, seed=1))[0].tokens

    def reused(owner: str) -> int:
        ((job, heard),) = jobs_of(target, plain.requests([prompt], max_new_tokens=5, seed=1), owner=owner)
        scheduler.submit([job])
        run(scheduler)
        assert heard.tokens == alone
        return job.reused

    assert [reused(owner) for owner in ("Ada", "Bob", "Ada", "Bob", "")] == [0, 0, 29, 29, 0]


def test_many_answers_to_one_request_do_not_bar_the_others(target: Target) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target, rows=1)
    many = jobs_of(target, plain.requests([[1, 2]], max_new_tokens=3, seed=1, n=6, ignore_eos=True))
    one, heard = jobs_of(target, plain.requests([[3]], max_new_tokens=3, seed=1, ignore_eos=True))[0]
    scheduler.submit([job for job, _ in many])
    scheduler.submit([one])
    while not heard.done.is_set():
        scheduler.turn()
    assert sum(h.done.is_set() for _, h in many) == 1


def test_the_queue_is_bounded(target: Target) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target, rows=2, queue=1)
    for i in range(3):
        scheduler.submit([jobs_of(target, plain.requests([[i]], max_new_tokens=3, seed=1))[0][0]])
    with pytest.raises(QueueFull, match="the queue holds 1"):
        scheduler.submit([jobs_of(target, plain.requests([[1]], max_new_tokens=3, seed=1))[0][0]])
    assert scheduler.retry_after() >= 1
    many = jobs_of(target, plain.requests([[1]], max_new_tokens=3, seed=1, n=4))
    with pytest.raises(ConfigError, match="asks for 4 answers"):  # waiting would not help
        scheduler.submit([job for job, _ in many])
    run(scheduler)
    scheduler.submit([jobs_of(target, plain.requests([[1]], max_new_tokens=3, seed=1))[0][0]])


def test_a_cancelled_row_is_free_before_the_next_step(target: Target) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target, rows=1)
    job, heard = jobs_of(target, plain.requests([[1, 2]], max_new_tokens=60, seed=1, ignore_eos=True))[0]
    other, after = jobs_of(target, plain.requests([[1, 2]], max_new_tokens=2, seed=1, ignore_eos=True))[0]
    scheduler.submit([job])
    scheduler.submit([other])
    scheduler.turn()
    got = len(heard.tokens)
    scheduler.cancel([job])
    scheduler.turn()
    assert after.tokens
    assert len(heard.tokens) == got
    assert scheduler.metrics.finished["cancelled"] == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_plain_and_drafting_rows_share_steps(target: Target, recorded: bool) -> None:
    """A row that asked for plain decoding verifies nothing but its last token; twin: the other one guesses."""
    plain = Engine(target, NoDrafter())
    scheduler = make(target, recorded=recorded)
    options = {"max_new_tokens": 60, "seed": 1, "temperature": 1.0, "ignore_eos": True}
    told: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # nodes and new tokens of each step
    for drafts in told:
        scheduler.submit([jobs_of(target, plain.requests([[1, 2]], **options), drafts=drafts)[0][0]])
    step = scheduler.batch.step
    sizes: list[int] = []

    def stepped(*given: Any, **more: Any) -> Any:
        results = step(*given, **more)
        for result in results:
            sizes.append(len(result.rows))
            for row, output in result.rows:
                if output.steps:
                    told[row.drafts].append((output.nodes, len(output.tokens)))
        return results

    scheduler.batch.step = stepped  # type: ignore[method-assign]
    for _ in range(12):
        scheduler.turn()
    assert set(sizes) == {2}
    assert set(told[False]) == {(0, 1)}
    assert all(nodes > 0 for nodes, _ in told[True])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_died(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an error of the device: the step fails, and so does whatever is tried afterwards."""
    plain = Engine(target, NoDrafter())
    scheduler = make(target, rows=1)
    every = [jobs_of(target, plain.requests([[i]], max_new_tokens=9, seed=1))[0] for i in range(3)]
    for job, _ in every:
        scheduler.submit([job])

    def broken(self: Batch) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Batch, "_collect", broken)
    monkeypatch.setattr(Batch, "reset", broken)
    scheduler.start()
    assert scheduler.thread is not None
    scheduler.thread.join(timeout=30)
    assert not scheduler.thread.is_alive()
    assert all(h.last is not None and h.last.error is not None for _, h in every)
    with pytest.raises(Draining):
        scheduler.submit([every[0][0]])


def test_stopping_finishes_what_runs_and_refuses_the_rest(target: Target) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target)
    job, heard = jobs_of(target, plain.requests([[1, 2]], max_new_tokens=30, seed=1))[0]
    scheduler.start()
    scheduler.submit([job])
    scheduler.stop(grace=30)
    assert heard.tokens == plain.complete([job.request])[0].tokens
    with pytest.raises(Draining):
        scheduler.submit([job])


def test_stopping_without_patience_loses_none_silently(target: Target) -> None:
    plain = Engine(target, NoDrafter())
    scheduler = make(target, rows=1)
    every = [jobs_of(target, plain.requests([[i]], max_new_tokens=60, seed=1, ignore_eos=True))[0] for i in range(4)]
    for job, _ in every:
        scheduler.submit([job])
    scheduler.turn()
    scheduler.stop(grace=0)
    assert all(h.last is not None and isinstance(h.last.error, Draining) for _, h in every)


@pytest.mark.parametrize("rule", ["seeded", "rejection", "typical"])
@pytest.mark.parametrize("draft", ["recurrent", "model"])
def test_every_rule_and_a_draft_model_are_served(target: Target, rule: str, draft: str) -> None:
    """One request after the other, with the engine's own shape: the server writes what `generate` writes."""
    drafter = ModelDrafter(target, target) if draft == "model" else recurrent_drafter(target)
    engine = Engine(target, drafter, shape=SHAPES[1], rule=RuleConfig(name=rule))
    batch = Batch(target, drafter, rows=2, context=90, shapes=[SHAPES[1]], rules=engine.make_rule)
    scheduler = Scheduler(batch, FixedSteps(SHAPES[1]))
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": [4, 5], "ignore_eos": True}
    for request in engine.requests([[1, 2, 3], [4, 5]], **options):
        ((job, heard),) = jobs_of(target, [request], rule=engine.rule_config)
        scheduler.submit([job])
        run(scheduler)
        assert heard.tokens == engine.complete([request])[0].tokens
        assert job.writer.stats.lossless == (rule != "typical")
        assert job.writer.stats.accepted > 0


def test_letters_end(target: Target) -> None:
    """The toy's own ending token ends rows here too."""
    assert Engine(target, NoDrafter()).eos_tokens() == (END,)
