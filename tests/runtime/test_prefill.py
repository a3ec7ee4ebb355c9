"""Prompts that are read in pieces by the passes of recorded steps; and what is recorded before it is needed."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from redrafter import Shape
from redrafter.config import SamplingParams
from redrafter.planning.late import Action, LatePlanner, Load
from redrafter.planning.late_steps import LateSteps
from redrafter.planning.steps import FixedSteps, late_planner
from redrafter.runtime import flat_pass
from redrafter.runtime.batch import Batch
from redrafter.runtime.flat_pass import AT_ONCE, FlatPasses
from redrafter.runtime.recorded import visited, without_padding
from redrafter.runtime.row import Request, Row
from redrafter.targets import Target
from redrafter.tuning.at_rest import warm_up
from tests.helpers.zoo import VOCAB, make_model
from tests.runtime.test_batch import SHAPES, alone, everyone, make_batch, opened, requests, serve, stepped


@pytest.fixture(scope="module")
def single() -> Target:
    """In fp32, which the tree kernel knows: prompts are read by recorded passes."""
    return Target(make_model("llama", torch.float32))


def recorded(target: Target, **options: Any) -> Batch:
    return make_batch(target, recorded=True, runtime="graphs", **options)


def passes_of(batch: Batch) -> FlatPasses:
    assert batch.steps is not None
    assert batch.steps.passes is not None
    return batch.steps.passes


def reading_sizes(batch: Batch) -> set[int]:
    """Tokens of the recorded passes with pieces of prompts."""
    return {size for _, size, rows in passes_of(batch).graphs if rows > 0}


def finished(batch: Batch, shape: Shape | None) -> dict[Row, list[int]]:
    """Step until all rows are done; what they wrote since."""
    texts: dict[Row, list[int]] = {row: [] for row in batch.at if row is not None and row.open}
    while any(row.open for row in texts):
        for row, output in everyone(batch.step(shape)):
            texts[row] += output.tokens
            if output.done:
                batch.close(row)
    batch.drain()
    return texts


def text_alone(target: Target, request: Request) -> list[int]:
    batch = make_batch(target)
    opened(batch, request)
    ((_, tokens),) = finished(batch, None).items()
    return tokens


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma3"])
def test_recorded_passes_read_pieces_of_any_length(kind: str) -> None:
    """Filled up to the recorded ones, with the row's place in the step beside them."""
    target = Target(make_model(kind, torch.float32))
    request = Request(prompt=[i % VOCAB for i in range(80)], seed=0, max_new_tokens=9)
    expected = text_alone(target, request)
    for most, sizes in ((1, {32}), (7, {32}), (33, {64, 32}), (80, {128})):
        batch = recorded(target)
        row = batch.open(request)
        while row.unread:
            batch.step(pieces={row: min(most, row.unread)})
        assert row.live, "the pass that reads the prompt's end takes the row's first step"
        assert list(finished(batch, SHAPES[0]).values()) == [expected]
        assert reading_sizes(batch) == sizes


def test_several_prompts_are_read_beside_rows_that_decode(single: Target) -> None:
    """In one pass: a row that drafts, a plain row, and pieces of three prompts, one of which ends."""
    prompts = [[3, 1, 4], [1, 5, 9], list(range(30)), list(range(9, 29)), [2, 7, 1, 8]]
    every = [Request(prompt=p, seed=i, max_new_tokens=20) for i, p in enumerate(prompts)]
    batch = recorded(single)
    rows = [opened(batch, every[0]), opened(batch, every[1], drafts=False)]
    texts: dict[Row, list[int]] = {}
    for row, output in everyone(batch.step(SHAPES[0]) + batch.step(SHAPES[0]) + batch.drain()):
        texts[row] = texts.get(row, []) + output.tokens
    rows += [batch.open(r, reuses=False) for r in every[2:]]
    (late,) = batch.step(SHAPES[0], pieces=dict(zip(rows[2:], (13, 7, 3), strict=True))) + batch.drain()
    assert (late.read, late.size) == (23, 3)
    assert [(row.known, row.live) for row in rows[2:4]] == [(13, False), (7, False)]
    assert [output.steps for row, output in late.rows if row is rows[4]] == [0], "its first step"
    for row, output in late.rows:
        texts[row] = texts.get(row, []) + output.tokens
    batch.step(SHAPES[0], pieces=dict(zip(rows[2:4], (16, 12), strict=True)))
    for row, rest in finished(batch, SHAPES[0]).items():
        texts[row] = texts.get(row, []) + rest
    assert [texts[row] for row in rows] == [text_alone(single, r) for r in every]


def test_proposed_pieces_are_those_of_the_rows_that_came_first(single: Target) -> None:
    batch = recorded(single, rows=AT_ONCE + 2)
    lengths = [30, 1, 9, *[3] * (AT_ONCE - 1)]
    rows = [batch.open(Request(prompt=[5] * n, seed=0, max_new_tokens=3), reuses=False) for n in lengths]
    assert batch.pieces(20) == {rows[0]: 20}
    assert batch.pieces(33) == {rows[0]: 29, rows[2]: 4}
    assert list(batch.pieces(512)) == [rows[0], *rows[2 : AT_ONCE + 1]], "a pass reads so many prompts"
    batch.close(rows[0])
    assert list(batch.pieces(8)) == [rows[2]]


def test_a_row_that_is_closed_while_its_prompt_is_read_leaves_no_trace(single: Target) -> None:
    """Its place is free at once, and the next row there reads its own prompt; others write what they write alone."""
    every = [Request(prompt=[i, 3, *range(25)], seed=i, max_new_tokens=12) for i in range(3)]
    batch = recorded(single, rows=2, kept=0)
    first, cancelled = opened(batch, every[0]), batch.open(every[1])
    batch.step(SHAPES[0], pieces={cancelled: 11})
    batch.close(cancelled)
    assert (batch.free, batch.used) == (1, first.known)
    again = batch.open(every[2])
    assert again.place == cancelled.place
    results = batch.step(SHAPES[0], pieces={again: again.unread})
    texts = {row: list(output.tokens) for row, output in everyone(results)}
    assert set(texts) == {first}
    for row, rest in finished(batch, SHAPES[0]).items():
        texts[row] = texts.get(row, []) + rest
    assert texts == {first: text_alone(single, every[0]), again: text_alone(single, every[2])}


def test_results_come_one_step_late(single: Target) -> None:
    """The next step runs while the host reads those of the step before."""
    batch = recorded(single)
    row = opened(batch, Request(prompt=[3, 1, 4], seed=0, max_new_tokens=9))
    assert batch.step() == []
    assert row.ids == [3, 1, 4]
    ((_, first),) = everyone(batch.step())
    assert (first.steps, len(first.tokens), len(row.ids)) == (0, 1, 4)
    ((_, second),) = everyone(batch.drain())
    assert (second.steps, len(row.ids)) == (1, 5)
    assert batch.drain() == []


def wrong_place(self: FlatPasses, area: int, trees: int, rows: int, pieces: Any) -> None:
    RUN(self, area, trees, rows, [replace(piece, place=(piece.place + 1) % 9) for piece in pieces])


def wrong_begin(self: FlatPasses, area: int, trees: int, rows: int, pieces: Any) -> None:
    RUN(self, area, trees, rows, [replace(piece, begin=piece.begin + (piece.begin > 0)) for piece in pieces])


RUN = FlatPasses.run


@pytest.mark.parametrize("wrong", [wrong_place, wrong_begin])
def test_a_wrong_piece_is_noticed(single: Target, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    """Twins: prompts read into the next row's place, or a slot too far."""
    monkeypatch.setattr(FlatPasses, "run", wrong)
    chance = random.Random(0)
    every = requests(single, 8, chance)
    assert serve(recorded(single), every, chance) != dict(enumerate(alone(single, every)))


class EveryShape(FixedSteps):
    """Any of them, whatever the number of rows."""

    def shapes(self, rows: int) -> list[Shape | None]:
        return [*SHAPES, None]


def test_what_is_prepared_is_not_recorded_when_it_is_needed(single: Target) -> None:
    batch = recorded(single, rows=3)
    assert batch.steps is not None
    warm_up(batch, EveryShape(None), chunk=3 * 16)
    assert batch.free == batch.rows
    before = set(batch.steps.steps), set(passes_of(batch).graphs)
    chance = random.Random(8)
    every = requests(single, 12, chance)
    assert serve(batch, every, chance) == dict(enumerate(alone(single, every)))
    # Watched rows are rare: their steps are recorded at first use.
    made = {kind for kind in batch.steps.steps if not kind.guided}
    assert (made, set(passes_of(batch).graphs)) == before
    small = recorded(single, rows=3)
    warm_up(small, EveryShape(None), [SamplingParams()], chunk=16)
    assert small.steps is not None
    assert set(small.steps.steps) < before[0], "greedy rows alone need fewer"
    assert set(passes_of(small).graphs) < before[1], "and shorter pieces"


def test_an_own_pass_for_log_probabilities_of_a_prompt(single: Target) -> None:
    """Steps read no piece of such a prompt: the logits of all its tokens are wanted."""
    batch = recorded(single)
    row = batch.open(Request(prompt=[3, 1, 4, 1, 5], seed=0, max_new_tokens=3), prompt_logprobs=2)
    assert batch.pieces(64) == {}
    while row.unread:
        batch.read(row, 3)
    output = stepped(batch, None)
    with torch.no_grad():
        logp = single.model(input_ids=torch.tensor([[3, 1, 4, 1, 5]])).logits[0].float().log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert [told[0][0] for told in output.prompt_logprobs] == [1, 4, 1, 5]
    for at, told in zip(logp, output.prompt_logprobs, strict=False):
        assert [t for t, _ in told[1:]] == at.topk(2).indices.tolist()
        assert told[0][1] == pytest.approx(float(at[told[0][0]]), abs=1e-4)


def test_what_a_planner_may_choose_is_prepared_and_measured(single: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it then chooses, nothing more is recorded, and each row writes what it writes alone."""
    monkeypatch.setattr(flat_pass, "LEAST", 4)  # smaller than most passes here, as passes of many nodes are
    batch, steps, draw = recorded(single, rows=3), LateSteps(late_planner(SHAPES[0], 2)), random.Random(8)
    assert batch.steps is not None
    warm_up(batch, steps, [SamplingParams()], chunk=16)
    assert steps.planner.costs.known, "the prices were measured meanwhile"
    before = set(batch.steps.steps), set(passes_of(batch).graphs)
    monkeypatch.setattr(
        LatePlanner, "choose", lambda _, load, drafts, ready: draw.choice([*drafts, Action(None, 0, load.tokens)])
    )
    every = [Request(prompt=[i, 3, 1, 4], seed=i, max_new_tokens=9 + i) for i in range(7)]
    texts: dict[Row, list[int]] = {}
    waiting, made = list(every), []
    while waiting or any(row.open for row in texts):
        while waiting and batch.free:
            made.append(batch.open(waiting.pop(0), reuses=False))
            texts[made[-1]] = []
        for result in steps.step(batch, [row for row in made if row.open], batch.pieces(16)):
            for row, output in result.rows:
                texts[row] += output.tokens
                if not output.steps:
                    steps.open(row)
                if output.done and row.open:
                    batch.close(row)
    assert list(texts.values()) == [text_alone(single, request) for request in every]
    assert (set(batch.steps.steps), set(passes_of(batch).graphs)) == before


@pytest.mark.parametrize("drafting", [4, 8])
def test_a_plain_row_that_joins_leaves_room_for_the_nodes_of_the_others(
    single: Target, monkeypatch: pytest.MonkeyPatch, drafting: int
) -> None:
    """It makes the step one of more places, which has room for fewer nodes: the planner knows, and so does the step."""
    shape = Shape.of("16x5:63")
    every = [Request(prompt=[i, 3, 1, 4], seed=i, max_new_tokens=12) for i in range(drafting + 1)]
    want = [text_alone(single, request) for request in every]
    most = {places: max(without_padding(places, visited(shape))) for places in (drafting, 2 * drafting)}
    assert most[drafting] > most[2 * drafting]
    loads: list[Load] = []
    monkeypatch.setattr(
        LatePlanner,
        "choose",
        lambda _, load, drafts, ready: loads.append(load) or max(drafts, key=lambda action: action.nodes),  # type: ignore[func-returns-value]
    )
    for planned in (True, False):
        batch = recorded(single, rows=2 * drafting, shapes=[shape], kept=0)
        rows, texts = [batch.open(request, reuses=False) for request in every[:-1]], dict[Row, list[int]]()
        steps, nodes = LateSteps(late_planner(shape)), set()
        batch.read_all(rows)
        for turn in range(16):
            if turn == 3:
                rows.append(batch.open(every[-1], drafts=False, reuses=False))
            pieces = batch.pieces(16)
            if planned:
                results = steps.step(batch, [row for row in rows if row.drafts and row.open], pieces)
            else:  # twin of a planner that miscounts
                results = batch.step(shape, pieces=pieces, budget=most[drafting])
            for result in results:
                nodes.add((batch.places(result.size), result.budget))
                for row, output in result.rows:
                    texts.setdefault(row, []).extend(output.tokens)
                    if output.done:
                        batch.close(row)
            if not any(row.open for row in rows):
                break
        assert [texts[row] for row in rows] == want
        assert nodes >= most.items(), nodes
        if planned:
            assert {load.places for load in loads[:3]} == {drafting}
            assert loads[3].places == 2 * drafting
