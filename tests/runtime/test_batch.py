"""Rows that join, are read in pieces, step together and leave in any order write what each writes alone."""

import itertools
import random
from typing import Any

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.config import RuleConfig, SamplingParams
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import AT_ONCE
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Request, Row, RowOutput
from redrafter.runtime.state import BatchState
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets import Target, load_target
from tests.helpers.zoo import PROMPTS, VOCAB, OracleDrafter, make_model, peer_drafter, recurrent_drafter

SHAPES = [Shape(width=3, length=3), Shape(width=2, length=2, nodes=3), Shape(width=1, length=1)]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.7, "logit_bias": {3: 2.0, 5: -torch.inf}},
]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model())


def make_batch(target: Target, drafter: Any = None, **options: Any) -> Batch:
    drafter = drafter or recurrent_drafter(target, memory_heads=2, memory_size=8)
    return Batch(target, drafter, **({"rows": 6, "context": 90, "kept": 3, "shapes": SHAPES, "endings": 2} | options))


def requests(target: Target, count: int, chance: random.Random) -> list[Any]:
    engine = Engine(target, NoDrafter())
    made = []
    system = [chance.randrange(VOCAB) for _ in range(20)]
    for i in range(count):
        prompt = (system if chance.random() < 0.5 else []) + [
            chance.randrange(VOCAB) for _ in range(chance.randint(1, 30))
        ]
        options = KINDS[i % len(KINDS)] | {"max_new_tokens": chance.randint(1, 30), "seed": i}
        made.append(engine.requests([prompt], **options)[0])
    return [type(r)(**(vars(r) | {"eos": (11, 23) if i % 2 else ()})) for i, r in enumerate(made)]


def alone(target: Target, every: list[Any]) -> list[list[int]]:
    engine = Engine(target, NoDrafter())
    return [engine.complete([r])[0].tokens for r in every]


def serve(batch: Batch, every: list[Any], chance: random.Random, cancel: float = 0.0) -> dict[int, list[int]]:
    """Whatever order chance wants; texts of the rows that were not cancelled."""
    waiting = list(range(len(every)))
    rows: dict[Row, int] = {}
    texts: dict[int, list[int]] = {i: [] for i in waiting}
    while waiting or rows:
        while waiting and batch.free and chance.random() < 0.7:
            i = waiting.pop(0)
            logprobs = 3 if chance.random() < 0.1 else None
            rows[batch.open(every[i], drafts=chance.random() < 0.7, logprobs=logprobs)] = i
        pieces: dict[Row, int] = {}
        for row in [row for row in rows if row.unread and chance.random() < 0.5]:
            most = chance.choice([1, 5, 16])
            if batch.reads_in_steps and len(pieces) < AT_ONCE and chance.random() < 0.7:
                batch.reuse(row)
                pieces |= {row: min(most, row.unread)} if row.unread else {}
            else:
                batch.read(row, most)
        decoding = any(row.unread <= pieces.get(row, 0) for row in rows)
        if (decoding or pieces) and chance.random() < 0.8:
            for result in batch.step(chance.choice([*SHAPES, None]), pieces=pieces):
                for row, written in result.rows:
                    if row not in rows:  # finished by an earlier step of the same results
                        continue
                    texts[rows[row]] += written.tokens
                    assert row.ids == [*row.request.prompt, *texts[rows[row]]]
                    if written.done:
                        batch.close(row)
                        del rows[row]
        for row in list(rows):
            if chance.random() < cancel:
                batch.close(row)
                del texts[rows.pop(row)]
    assert batch.free == batch.rows
    return texts


@pytest.mark.parametrize("recorded", [False, True], ids=["exact", "buckets"])
@pytest.mark.parametrize("cancel", [0.0, 0.03])
def test_same_texts_as_alone(target: Target, recorded: bool, cancel: float) -> None:
    chance = random.Random(f"{recorded} {cancel}")
    every = requests(target, 20, chance)
    batch = make_batch(target, recorded=recorded)
    texts = serve(batch, every, chance, cancel)
    expected = alone(target, every)
    assert len(texts) == 20 if not cancel else 3 < len(texts) < 20
    assert texts == {i: expected[i] for i in texts}


OTHERS = {"mistral": ["ngram", "recurrent+ngram"], "gemma3": ["recurrent", "eagle"], "gpt2": ["none", "medusa"]}
"""Each drafter with one target, each target with two drafters: they know each other by hidden states only."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if name in usual else pytest.mark.slow)
        for kind, usual in OTHERS.items()
        for name in itertools.chain(*OTHERS.values())
    ],
)
def test_other_targets_and_drafters(kind: str, name: str) -> None:
    target = Target(make_model(kind))
    if name in ("medusa", "eagle"):
        drafter = peer_drafter(name, target)
    else:
        drafter = {"ngram": NgramDrafter(2, 1), "none": NoDrafter()}.get(name) or recurrent_drafter(target)
        drafter = WithNgrams(drafter) if name == "recurrent+ngram" else drafter
    chance = random.Random(kind + name)
    every = requests(target, 12, chance)
    assert serve(make_batch(target, drafter), every, chance) == dict(enumerate(alone(target, every)))


def wrong_swap(self: BatchState, a: int, b: int, length: int) -> None:
    for x in self.cache.tensors():
        x[a, :, :length], x[b, :, :length] = x[b, :, :length].clone(), x[a, :, :length].clone()


def wrong_copy(self: BatchState, source: int, place: int, start: int, stop: int) -> None:
    self.history[place, start:stop] = self.history[source, start:stop]


@pytest.mark.parametrize(("name", "new"), [("swap", wrong_swap), ("copy", wrong_copy)])
def test_a_broken_table_is_noticed(target: Target, monkeypatch: pytest.MonkeyPatch, name: str, new: Any) -> None:
    """Twins: rows that change places by halves, or take over a beginning without its keys."""
    chance = random.Random(0)
    every = requests(target, 12, chance)
    monkeypatch.setattr(BatchState, name, new)
    assert serve(make_batch(target), every, chance) != dict(enumerate(alone(target, every)))


KIND = SamplingParams(temperature=1.0)


def request(prompt: list[int], seed: int, budget: int, sampling: SamplingParams = KIND) -> Request:
    return Request(prompt=prompt, seed=seed, max_new_tokens=budget, sampling=sampling)


def everyone(results: list[StepResult]) -> list[tuple[Row, RowOutput]]:
    return [pair for result in results for pair in result.rows]


def stepped(batch: Batch, shape: Shape | None) -> RowOutput:
    """A step of a batch of one row."""
    ((_, output),) = everyone(batch.step(shape) + batch.drain())
    return output


def opened(batch: Batch, request: Request, most: int = 64, **options: Any) -> Row:
    """A row whose prompt is read, in pieces of `most` tokens: its next step is its first."""
    row = batch.open(request, **options)
    while row.unread:
        batch.read(row, most)
    return row


def drafted(batch: Batch, prompts: list[list[int]], budget: int = 20) -> list[list[tuple[int, int]]]:
    """One prompt after the other: of each step, tokens and how many were guessed."""
    found = []
    for prompt in prompts:
        row, steps, done = opened(batch, request(prompt, 1, budget), 16), [], False
        while not done:
            written = stepped(batch, SHAPES[0])
            steps.append((len(written.tokens), written.drafted))
            done = written.done
        batch.close(row)
        found.append(steps)
    return found


def test_a_known_beginning_is_not_read_again_and_guesses_stay_the_same(target: Target) -> None:
    chance = random.Random(5)
    first = [chance.randrange(VOCAB) for _ in range(40)]
    second = [*first[:33], 1, 2, 3]
    batch = make_batch(target)
    read: list[int] = []
    prefill = target.prefill

    def counted(tokens: torch.Tensor, lengths: list[int], cache: Any, layers: Any, begin: int = 0) -> Any:
        read.append(lengths[0])
        return prefill(tokens, lengths, cache, layers, begin)

    apart = [drafted(make_batch(target), [p])[0] for p in (first, second)]
    target.prefill = counted  # type: ignore[method-assign]
    try:
        together = drafted(batch, [first, second])
    finally:
        del target.prefill  # type: ignore[method-assign]
    assert together == apart
    assert sum(d for steps in together for _, d in steps) > 0, "else nothing is shown about guesses"
    assert read == [16, 16, 7, 2], "of the second prompt its own end alone; last tokens are read by steps"
    assert batch.used == 0


def test_guesses_notice_lost_hidden_states(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: a taken-over beginning without hidden states guesses otherwise (and writes the same)."""
    chance = random.Random(5)
    first = [chance.randrange(VOCAB) for _ in range(40)]
    second = [*first[:33], 1, 2, 3]
    copy = BatchState.copy

    def keys_only(self: BatchState, source: int, place: int, start: int, stop: int) -> None:
        copy(self, source, place, start, stop)
        self.history[place, start:stop] = 0

    apart = drafted(make_batch(target), [second])
    monkeypatch.setattr(BatchState, "copy", keys_only)
    assert drafted(make_batch(target), [first, second])[1:] != apart


def test_a_chats_next_turn_reuses_the_answer(target: Target) -> None:
    batch = make_batch(target)
    prompt = list(range(20))
    row = opened(batch, request(prompt, 1, 12), 16)
    while not stepped(batch, SHAPES[0]).done:
        pass
    batch.close(row)
    again = batch.open(request([*row.ids, 5, 6], 1, 4))
    batch.read(again, 64)
    assert again.reused == len(row.ids) - 1


def test_logprobs_are_the_targets_own(target: Target) -> None:
    batch = make_batch(target)
    prompt = [3, 1, 4, 1, 5]
    row = opened(batch, request(prompt, 1, 9, SamplingParams(temperature=2.0, top_k=4)), logprobs=5)
    every: list[Any] = []
    done = False
    while not done:
        written = stepped(batch, SHAPES[0])
        every += zip(written.tokens, written.logprobs or [], strict=True)
        done = written.done
    assert len(every) == 9
    whole = torch.tensor([row.ids])
    with torch.no_grad():
        logp = target.model(input_ids=whole).logits[0].float().log_softmax(-1)
    for i, (token, found) in enumerate(every):
        at = logp[len(prompt) - 1 + i]
        assert found[0][0] == token
        assert found[0][1] == pytest.approx(float(at[token]), abs=1e-5)
        assert [t for t, _ in found[1:]] == at.topk(5).indices.tolist()


def test_a_processor_that_raises_ends_its_row_alone(target: Target) -> None:
    batch = make_batch(target)
    rows = [batch.open(request([3, 1, 4, i], i, 12)) for i in range(3)]

    def bad(logits: torch.Tensor, tree: Any) -> torch.Tensor:
        if len(rows[1].ids) > 6:
            raise ValueError("no")
        return logits

    rows[1].processor = bad
    texts: dict[Any, list[int]] = {row: [] for row in rows}
    batch.read_all(rows)
    failed = None
    while any(row.open for row in rows):
        for row, written in everyone(batch.step(SHAPES[0])):
            texts[row] += written.tokens
            if written.error is not None:
                failed = row
            if written.done or written.error is not None:
                batch.close(row)
    assert failed is rows[1]
    engine = Engine(target, NoDrafter())
    for i in (0, 2):
        assert texts[rows[i]] == engine.generate([3, 1, 4, i], max_new_tokens=12, temperature=1.0, seed=i).tokens


def test_the_tree_of_a_step_is_told(target: Target) -> None:
    batch = make_batch(target)
    row = opened(batch, request([3, 1, 4], 2, 30))
    first = stepped(batch, SHAPES[0])
    assert (first.steps, first.tree) == (0, ([4], [0], [0])), "the prompt's last token and no guess"
    seen = 0
    for _ in range(6):
        last = row.ids[-1]
        written = stepped(batch, SHAPES[0])
        assert written.tree is not None
        tokens, parents, path = written.tree
        assert len(tokens) == len(parents) == written.nodes + 1 == 10
        assert tokens[0] == last
        assert [tokens[n] for n in path[1:]] == written.tokens[: written.drafted]
        assert all(parents[b] == a for a, b in itertools.pairwise(path))
        seen += written.drafted
    assert seen


@pytest.mark.parametrize("recorded", [False, True])
def test_a_draft_model_joins_too(target: Target, recorded: bool) -> None:
    chance = random.Random(3)
    every = requests(target, 12, chance)
    batch = make_batch(target, ModelDrafter(target, target), recorded=recorded)
    assert serve(batch, every, chance) == dict(enumerate(alone(target, every)))


@pytest.mark.parametrize("name", ["rejection", "typical"])
def test_other_rules_write_what_they_write_alone(target: Target, name: str) -> None:
    """Their texts depend on what was guessed, so every row drafts with one shape."""
    rule, shape = RuleConfig(name=name), Shape(width=1, length=3)
    engine = Engine(target, recurrent_drafter(target), shape=shape, rule=rule)
    prompts = [[3, 1, 4, i] for i in range(6)]
    together = engine.generate(prompts, batch_size=4, max_new_tokens=20, temperature=1.0, seed=list(range(6)))
    apart = [engine.generate(p, max_new_tokens=20, temperature=1.0, seed=i) for i, p in enumerate(prompts)]
    assert [c.tokens for c in together] == [c.tokens for c in apart]
    assert sum(c.stats.accepted for c in together) > 0


def test_plain_rows_compute_no_guess(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, guessing = StepDrafter.draft, []

    def seen(self: StepDrafter, *arguments: Any) -> Any:
        guessing.append(self.guesses)
        return draft(self, *arguments)

    monkeypatch.setattr(StepDrafter, "draft", seen)
    for drafts in (False, True):  # twin: a row that drafts, which does so from its second step on
        batch = make_batch(target)
        opened(batch, request([3, 1, 4], 2, 5), drafts=drafts)
        nodes = [stepped(batch, SHAPES[0]).nodes for _ in range(2)]
        assert [n > 0 for n in nodes] == [False, drafts]
        assert guessing == [False, drafts]
        guessing.clear()


def trees(batch: Batch, plain: int) -> dict[int, Any]:
    """By where a step begins; the first `plain` steps come without a guess. Results may come one step late."""
    row = opened(batch, request(list(range(20)), 1, 40))
    found, at, launched = {}, len(row.ids), 0
    while at < 55:
        for _, written in everyone(batch.step(None if launched < plain else SHAPES[0])):
            found[at] = written.tree
            at += len(written.tokens)
        launched += 1
    return found


@pytest.mark.parametrize("recorded", [False, True])
def test_a_drafter_left_behind_catches_up(target: Target, monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    """Steps without a guess in between change no later guess; twin: one that never hears of them guesses otherwise."""
    often, later = (trees(make_batch(target, recorded=recorded), plain) for plain in (0, 12))
    shared = [at for at in often if at in later and at >= 34]
    assert len(shared) >= 3
    assert [often[at] for at in shared] == [later[at] for at in shared]
    monkeypatch.setattr(BatchState, "catch_up", lambda *_: None)
    deaf = trees(make_batch(target, recorded=recorded), 12)
    both = [at for at in shared if at in deaf]  # steps that begin at the same places of a text
    assert both
    assert [often[at] for at in both] != [deaf[at] for at in both]


def test_the_tree_kernels_rows_write_the_same() -> None:
    """In fp32, where the kernel stands in for the model's attention, over parts of one table."""
    target = Target(make_model("llama", torch.float32))
    chance = random.Random(9)
    every = requests(target, 12, chance)
    batch = make_batch(target, recurrent_drafter(target), recorded=True, runtime="graphs")
    assert serve(batch, every, chance) == dict(enumerate(alone(target, every)))
    assert batch.reads_in_steps
    assert batch.steps is not None
    assert batch.steps.steps


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["flat", "padded"])
def test_a_row_moves_with_the_tokens_of_steps_under_way(dtype: torch.dtype) -> None:
    """A recorded step is read one step late: the host does not know yet how far the row is."""
    target = load_target(make_model("llama", dtype))
    asked = Engine(target, NoDrafter()).requests(PROMPTS[1::-1], max_new_tokens=40, seed=0)  # the longer one moves
    texts = [Engine(target, NoDrafter()).complete([request])[0].tokens for request in asked]
    drafter = OracleDrafter([list(request.prompt) for request in asked], texts, skill=1.0)
    shape = Shape(width=1, length=7)
    batch = Batch(target, drafter, rows=2, context=90, shapes=[shape], runtime="graphs", recorded=True)
    first, second = (batch.open(request) for request in asked)
    batch.read_all([first, second])
    tokens: list[int] = []
    moved = False
    while len(tokens) < len(texts[1]):
        found = [out.tokens for result in batch.step(shape) for row, out in result.rows if row is second]
        tokens += [token for new in found for token in new]
        if first.open and len(tokens) > 8:
            assert batch.flights, "twin: without a step under way the host knows all"
            assert second.place == 1
            batch.close(first)
        moved |= second.place == 0
    assert moved
    assert tokens == texts[1]


@torch.no_grad()
def test_a_row_that_is_read_has_no_node_in_the_steps_of_others() -> None:
    """A step of three rows has four places. The fourth row is read meanwhile: a node of it would overwrite a key."""
    target = load_target(make_model("llama", torch.float32))
    prompts = [*PROMPTS[:3], [1 + i % 30 for i in range(33)]]
    asked = [Engine(target, NoDrafter()).requests([p], max_new_tokens=12, seed=0)[0] for p in prompts]
    texts = [Engine(target, NoDrafter()).complete([request])[0].tokens for request in asked]
    batch = Batch(target, NoDrafter(), rows=4, context=90, shapes=[], runtime="graphs", recorded=True)
    first = [batch.open(request) for request in asked[:3]]
    batch.read_all(first)
    batch.step()
    last, tokens = batch.open(asked[3]), list[int]()
    assert (last.place, batch.places(3)) == (3, 4)
    while len(tokens) < len(texts[3]):
        pieces = {last: min(4, last.unread)} if last.unread else {}
        for result in batch.step(pieces=pieces):
            tokens += [token for row, out in result.rows if row is last for token in out.tokens]
    assert tokens == texts[3]
