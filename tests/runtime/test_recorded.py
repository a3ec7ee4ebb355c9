"""Steps over fixed buffers: the same texts, told one step late. What only a GPU can do is in test_cuda.py."""

import gc
import logging
import weakref

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.core import flat
from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams
from redrafter.engine import decode
from redrafter.errors import UnsupportedTarget
from redrafter.kernels.tree_attention.naive import DEEPEST
from redrafter.runtime import batch as batch_module
from redrafter.runtime import flat_pass
from redrafter.runtime.batch import Batch
from redrafter.runtime.cache import Arena
from redrafter.runtime.recorded import RecordedSteps
from redrafter.runtime.recorded_step import RecordedStep
from redrafter.runtime.row import Request
from redrafter.targets import load_target
from redrafter.targets.cuda import tree_target as tree
from redrafter.targets.selfcheck import checked_tree_target
from tests.helpers.zoo import ARCHITECTURES, PROMPTS, make_model, recurrent_drafter


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_tree_kernel_gives_the_models_own_logits(kind):
    target = load_target(make_model(kind, torch.float32))
    before = target.config._attn_implementation
    checked_tree_target(target)
    assert target.config._attn_implementation == before


def test_twin_tree_kernel_with_wrong_ancestors_is_refused(monkeypatch):
    flatten = flat.flatten

    def wrong(tokens, depths, mask, *more):  # every node before is an ancestor
        return flatten(tokens, depths, torch.ones_like(mask).tril(), *more)

    monkeypatch.setattr(flat, "flatten", wrong)
    with pytest.raises(UnsupportedTarget, match="other logits"):
        checked_tree_target(load_target(make_model("llama", torch.float32)))


def recorded(target, drafter, shape=None) -> Engine:
    """An engine whose steps run over fixed buffers, on a CPU too."""
    engine = Engine(target, drafter, shape=shape, runtime="graphs")
    engine.recorded = True
    return engine


SETTINGS = {
    "greedy": {},
    "penalised": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "top_p": 0.9},
    "biased": {"temperature": 0.7, "seed": 5, "logit_bias": {3: 1.0}, "min_p": 0.01},
}
ATTENTION = {"tree kernel": torch.float32, "own attention": torch.float64}
USUAL = {
    ("llama", "tree kernel"): SETTINGS,
    ("llama", "own attention"): ["penalised"],
    ("qwen2-mixed", "tree kernel"): ["biased"],
    ("qwen2-mixed", "own attention"): ["greedy"],
    ("gpt2", "tree kernel"): ["penalised"],
    ("gpt2", "own attention"): ["biased"],
}
"""All settings with one model and kernel, one setting with each other model and kernel: sampling knows neither of them.
The other cases are slow."""
CASES = [
    pytest.param(kind, how, name, marks=() if name in usual else pytest.mark.slow)
    for (kind, how), usual in USUAL.items()
    for name in SETTINGS
]


@pytest.mark.parametrize(("kind", "how", "name"), CASES)
def test_texts_are_those_of_eager_steps(kind, how, name):
    target, options = load_target(make_model(kind, ATTENTION[how])), SETTINGS[name]
    options = options | {"max_new_tokens": 12}
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, **options)]
    joint = WithNgrams(recurrent_drafter(target))
    for drafter in (NoDrafter(), recurrent_drafter(target), NgramDrafter(2, 1), joint):
        engine = recorded(
            target, drafter, None if isinstance(drafter, NoDrafter) else Shape(width=3, length=4, nodes=9)
        )
        for prompts, want in ((PROMPTS, plain), (PROMPTS[:1], plain[:1]), (PROMPTS, plain)):
            assert [c.tokens for c in engine.generate(list(prompts), **options)] == want
        assert engine.recorded


def test_guesses_past_the_last_position_do_no_harm(monkeypatch):
    target = load_target(make_model("gpt2", torch.float32))
    prompt, room = [i * 7 % 39 + 1 for i in range(target.max_positions - 16)], {"max_new_tokens": 16}
    want = Engine(target, NoDrafter()).generate(prompt, **room).tokens
    shape = Shape(width=3, length=4, nodes=9)
    assert recorded(target, recurrent_drafter(target), shape).generate(prompt, **room).tokens == want
    monkeypatch.setattr(type(target), "clamp_positions", lambda self, positions: positions)
    monkeypatch.setattr(tree.TreeTarget, "longest", 10**6)
    with pytest.raises(IndexError):  # the twin: gpt2 looks its positions up
        recorded(target, recurrent_drafter(target), shape).generate(prompt, **room)


def test_one_prompt_is_read_by_recorded_passes_piece_by_piece(monkeypatch):
    for module in (flat_pass, batch_module, decode):
        monkeypatch.setattr(module, "MOST", 16)
    monkeypatch.setattr(flat_pass, "LEAST", 8)
    target = load_target(make_model("llama", torch.float32))
    drafter = recurrent_drafter(target, memory_heads=2, memory_size=8)
    engine = recorded(target, drafter, Shape(width=3, length=3, nodes=5))
    for length in (1, 10, 39):
        prompt = torch.arange(length) % 47
        want = Engine(target, NoDrafter()).generate(prompt.tolist(), max_new_tokens=20).tokens
        assert engine.generate(prompt.tolist(), max_new_tokens=20).tokens == want
        (batch,) = engine._idle
        with torch.no_grad():
            _, own = target.prefill(prompt[None], [length], KVCache(slots=64), drafter.layers)
        mine = batch.state.history[:1, :length].clone()
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    assert {size for _, size, rows in batch.steps.passes.graphs if rows > 0} == {8, 16, 32}
    prompt[3] += 1  # twin: another token in the first piece
    engine.generate(prompt.tolist(), max_new_tokens=20)
    other = batch.state.history[:1, :length]
    assert not torch.allclose(other[:, 3:16], own[:, 3:16], atol=1e-2)
    assert torch.equal(other[:, :3], mine[:, :3])


def test_a_closed_engine_leaves_its_memory_at_once():
    """Not when Python next looks for circles: room is needed now."""
    target = load_target(make_model("llama", torch.float32))
    engine = recorded(target, recurrent_drafter(target), Shape(width=2, length=2))
    engine.generate(PROMPTS[0], max_new_tokens=4)
    (batch,) = engine._idle
    assert batch.steps.passes.graphs
    for step in batch.steps.steps.values():
        step.graphs = ()  # a graph does not hold its step; what stands for it on a CPU does
    del step
    arena = weakref.ref(batch.state.cache)
    gc.disable()
    try:
        engine.close()
        assert arena() is not None, "twin: held here"
        del batch
        assert arena() is None
    finally:
        gc.enable()


def test_a_batch_serves_run_after_run_and_two_at_once():
    target = load_target(make_model())
    engine = recorded(target, recurrent_drafter(target), Shape(width=2, length=3))
    want = [engine.plain().generate(p, max_new_tokens=12).tokens for p in PROMPTS[:2]]
    assert [engine.generate(p, max_new_tokens=12).tokens for p in PROMPTS[:2]] == want
    assert len(engine._idle) == 1
    streams = [engine.stream([p], max_new_tokens=12) for p in PROMPTS[:2]]
    tokens = [[], []]
    for parts in zip(*streams, strict=False):  # turn by turn
        for mine, part in zip(tokens, parts, strict=True):
            mine += part.tokens
    for mine, stream in zip(tokens, streams, strict=True):
        mine += [t for part in stream for t in part.tokens]
    assert all(w[: len(t)] == t for w, t in zip(want, tokens, strict=True))
    assert len(engine._idle) == 2


def test_statistics_are_those_of_eager_steps():
    """Where each row has a budget of its own: alone, or where no budget cuts a tree."""
    target = load_target(make_model())
    drafter = recurrent_drafter(target)
    for shape, prompts in ((Shape(width=3, length=3, nodes=5), PROMPTS[:1]), (Shape(width=3, length=3), PROMPTS)):
        eager = Engine(target, drafter, shape=shape).generate(prompts, max_new_tokens=20)
        late = recorded(target, drafter, shape).generate(prompts, max_new_tokens=20)
        for mine, theirs in zip(late, eager, strict=True):
            assert (mine.stats.steps, mine.stats.accepted, mine.stats.nodes) == (
                theirs.stats.steps,
                theirs.stats.accepted,
                theirs.stats.nodes,
            )
            assert mine.stats.nodes > 0


@pytest.mark.parametrize("how", ATTENTION)
def test_rows_share_a_budget_of_nodes(how):
    """Under the rule seeded: the most probable nodes of all rows are verified; twin: in eager steps each row's own."""
    target, shape = load_target(make_model("llama", ATTENTION[how])), Shape(width=3, length=3, nodes=2)
    drafter = recurrent_drafter(target)

    def nodes(late: bool) -> list[list[int]]:
        """Of each step in which all rows draft, the drafted nodes of each row."""
        batch = Batch(target, drafter, rows=4, context=60, shapes=[shape], recorded=late, runtime="graphs")
        rows = [batch.open(Request(prompt=p, max_new_tokens=12, seed=0)) for p in PROMPTS[:4]]
        batch.read_all(rows)
        steps = []
        while any(row.open for row in rows):
            for result in batch.step(shape):
                steps.append([output.nodes for _, output in result.rows if output.steps])
                for row, output in result.rows:
                    if output.done:
                        batch.close(row)
        return [step for step in steps if len(step) == 4]

    shared, own = nodes(late=True), nodes(late=False)
    assert len(shared) > 2
    assert all(sum(step) == 4 * 2 for step in shared)
    assert any(max(step) > 2 for step in shared)
    assert all(max(step) <= 2 for step in own)


def test_a_row_stopped_from_outside_writes_no_more():
    target = load_target(make_model())
    engine = recorded(target, recurrent_drafter(target), Shape(width=2, length=2))
    whole = engine.generate(PROMPTS[0], max_new_tokens=20).tokens
    seen = [len(PROMPTS[0])]

    def halts(ids):
        seen.append(len(ids))
        return len(ids) >= len(PROMPTS[0]) + 7

    assert engine.generate(PROMPTS[0], max_new_tokens=20, halts=halts).tokens == whole[:7]
    assert max(seen) == len(PROMPTS[0]) + 7


def test_what_cannot_be_recorded_goes_on_eagerly(caplog):
    target = load_target(make_model())
    engine = recorded(target, ModelDrafter(target, target), Shape(width=2, length=2))
    want = [c.tokens for c in engine.plain().generate(PROMPTS, max_new_tokens=12)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=12)] == want
    assert len(caplog.records) == 1
    assert "cannot be recorded" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_prompts_read_in_pieces_are_prompts_read_at_once(kind, monkeypatch):
    monkeypatch.setattr(tree, "PIECE", 16)  # two full passes, one of the end of both prompts
    target = load_target(make_model(kind, torch.float32))
    tokens = torch.randint(40, (2, 33), generator=torch.Generator().manual_seed(1))
    caches = [Arena(target, 2, 64) for _ in range(2)]
    _, hidden = target.prefill(tokens, [33, 20], caches[0], (1, -1))
    whole = [Piece(0, 0, tokens[0].tolist()), Piece(1, 0, tokens[1, :20].tolist())]
    states = tree.TreeTarget(target).read(whole, caches[1], (1, -1))
    for a, b, n in zip(states, hidden, (33, 20), strict=True):
        torch.testing.assert_close(a, b[:n], rtol=1e-4, atol=1e-5)
    for a, b in zip(caches[1].tensors(), caches[0].tensors(), strict=True):
        torch.testing.assert_close(a[:, :, :20], b[:, :, :20], rtol=1e-4, atol=1e-5)


def test_a_part_of_a_part_counts_from_its_own_first_row():
    whole = Arena(load_target(make_model()), 3, 8)
    whole.part(0, 1)
    found = whole.part(1, 3).part(0, 1)
    assert all(a.data_ptr() == b[1].data_ptr() for a, b in zip(found.tensors(), whole.tensors(), strict=True))


def test_a_run_under_way_outlives_anothers_failure():
    """What cannot be recorded for one batch says nothing of the batch that is being written."""
    target = load_target(make_model())
    engine = recorded(target, recurrent_drafter(target), Shape(width=2, length=3))
    want = engine.plain().generate(PROMPTS[0], max_new_tokens=20).tokens
    stream = engine.stream([PROMPTS[0]], max_new_tokens=20)
    tokens = [t for _ in range(3) for t in next(stream).tokens]
    engine.recorded = False
    assert engine.generate(PROMPTS[0], max_new_tokens=20).tokens == want
    tokens += [t for part in stream for t in part.tokens]
    assert tokens == want


def test_a_failed_recording_leaves_no_half_made_step(monkeypatch, caplog):
    """The step that cannot be recorded runs eagerly; others are still recorded."""
    target = load_target(make_model())
    engine = recorded(target, recurrent_drafter(target), Shape(width=2, length=3))
    want = engine.plain().generate(PROMPTS[0], max_new_tokens=12).tokens
    monkeypatch.setattr(RecordedStep, "draft", lambda self: 1 / 0)
    with caplog.at_level(logging.WARNING):
        assert engine.generate(PROMPTS[0], max_new_tokens=12).tokens == want
    assert "ZeroDivisionError" in caplog.text
    (batch,) = engine._idle
    assert set(batch.steps.steps.values()) == {None}
    assert batch.free == batch.rows
    monkeypatch.undo()
    hot = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    assert engine.generate(PROMPTS[0], **hot).tokens == engine.plain().generate(PROMPTS[0], **hot).tokens
    done = [kind for kind, step in batch.steps.steps.items() if step is not None]
    assert [kind.shape for kind in done] == [None, engine.shape], "a row's first step, and the others"


def test_an_eager_step_after_recorded_ones_knows_how_long_the_rows_are(monkeypatch):
    """Results of recorded steps are read late; a step that cannot be recorded must wait for them."""
    target = load_target(make_model())
    engine = recorded(target, recurrent_drafter(target), Shape(width=2, length=3))
    want = engine.plain().generate(PROMPTS[0], max_new_tokens=60).tokens
    launch, calls = RecordedSteps.launch, []

    def sometimes(self, *arguments):
        calls.append(1)
        return None if len(calls) % 3 == 0 else launch(self, *arguments)

    monkeypatch.setattr(RecordedSteps, "launch", sometimes)
    assert engine.generate(PROMPTS[0], max_new_tokens=60).tokens == want
    assert len(calls) > 9


def test_freed_rows_take_the_next_prompts():
    target = load_target(make_model())
    for engine in (Engine(target, recurrent_drafter(target)), recorded(target, recurrent_drafter(target))):
        prompts = [[1 + i, 2, 3] for i in range(7)]
        budgets = [3, 40, 4, 5, 3, 30, 6]
        requests = [engine.requests([p], max_new_tokens=n)[0] for p, n in zip(prompts, budgets, strict=True)]
        sizes = []

        def counted(self, *args, sizes=sizes, step=batch_module.Batch.step, **kwargs):
            sizes.append(self.rows - self.free)
            return step(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_module.Batch, "step", counted)
            done = engine.complete(requests, rows=2)
        assert [c.tokens for c in done] == [engine.plain().complete([r])[0].tokens for r in requests]
        # The second request is the longest; the others pass through the first row beside it.
        assert sizes.count(2) > 0.6 * len(sizes)


def test_a_row_that_could_not_begin_is_left_alone_until_it_can():
    """A step that cannot be recorded waits for those under way; its new row is then still read, and steps later."""
    target = load_target(make_model("llama", torch.float32))
    drafter, shape = ModelDrafter(target, target), Shape(width=1, length=3)
    plain = Engine(target, NoDrafter())
    requests = plain.requests([[*range(3)], [*range(30)]], max_new_tokens=12, ignore_eos=True)
    wanted = [part.tokens for part in plain.complete(requests)]
    batch = Batch(target, drafter, rows=2, context=60, shapes=[shape], recorded=True)
    early = batch.open(requests[0], drafts=False)
    batch.step(pieces={early: 2})
    late = batch.open(requests[1])
    batch.step(shape, pieces={late: 29})
    assert late.unread == 29, "the step before was waited for"
    batch.step()  # of the other row; its buffers may have room for the late one
    assert batch.pieces(64) == {late: 29}
    batch.drain()
    while min(len(early.ids) - 3, len(late.ids) - 30) < 12:
        batch.step(shape, pieces=batch.pieces(64))
    assert [early.ids[3:], late.ids[30:]] == wanted


def test_no_node_of_a_flat_pass_is_deeper_than_its_lines_can_say(monkeypatch):
    """A processor that computes with logits makes steps eager; they verify by the same pass."""
    target, shape = load_target(make_model("llama", torch.float32)), Shape(width=2, length=18, nodes=36)
    batch = Batch(target, recurrent_drafter(target), rows=1, context=60, shapes=[shape], recorded=True)
    depths, verify = [], type(batch.eager.verifier).verify

    def seen(self, tree, *more):
        depths.append(int(tree.depths[tree.valid].max()))
        return verify(self, tree, *more)

    monkeypatch.setattr(type(batch.eager.verifier), "verify", seen)
    row = batch.open(Request(prompt=[5, 6, 7], max_new_tokens=9, seed=1), processor=lambda logits, _: logits)
    batch.read_all([row])
    for _ in range(3):
        batch.step(shape)
    assert max(depths) == DEEPEST


@torch.no_grad()
def test_a_pass_that_cannot_be_recorded_gives_up_its_memory(monkeypatch):
    """Later passes are recorded in a new pool: a recording that failed makes its own unusable."""
    target = load_target(make_model("llama", torch.float32))
    batch = Batch(target, NoDrafter(), rows=1, context=40, shapes=[], runtime="graphs", recorded=True)
    batch.read_all([batch.open(Request(prompt=(1, 2, 3), max_new_tokens=4, seed=0))])
    passes, pools = batch.steps.passes, iter("ab")
    monkeypatch.setattr(flat_pass, "new_memory", lambda device: next(pools))
    with monkeypatch.context() as patch:
        patch.setattr(flat_pass, "unrecorded", lambda actions: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            passes.graph(1, 1, 1, reads=False)
    assert passes.memory == "a"
    passes.graph(1, 1, 1, reads=False)
    assert passes.memory == "a"
