"""The plug-in for SGLang, on a stub of the engine that schedules as SGLang does: every text is the target's own."""

import random
from types import SimpleNamespace

import pytest
import torch

from redrafter import Shape
from redrafter.errors import ConfigError, DrafterMismatch, ModelNotFound, UnsupportedTarget
from redrafter.interop.sglang import checks, recorded, verify_input, worker
from redrafter.interop.sglang.target import HiddenStates, SglangTarget, drafter_for
from redrafter.interop.sglang.trees import TreeBatch
from redrafter.runtime.state import tensors_of
from redrafter.targets import load_target
from tests.helpers import sglang_stub as stub
from tests.helpers.sglang_worker import KnowingDrafter, check, make_worker, plain_texts, server_args, write
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, peer_drafter, recurrent_drafter


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


@pytest.fixture(scope="module")
def plain(target):
    return plain_texts(target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("knows", [False, True])
def test_texts_are_the_targets_own(target, plain, monkeypatch, temperature, knows):
    """Joins, leaves, prompts in pieces, a cached prefix and retractions at once."""
    texts = [p + plain[temperature, seed] for seed, p in enumerate(PROMPTS)]
    drafter = {"drafter_is": KnowingDrafter(texts), "drafter": "recurrent"} if knows else {}
    made = make_worker(target, monkeypatch, adaptive=False, **drafter)
    retract = {"request-0": 4, "request-2": 9}
    requests, run = write(made, temperature, retract=retract, cached={"request-2": 9}, slots=2)
    check(requests, plain)
    if knows or temperature:
        assert sum(run.accepted) > 6, "nothing is ever accepted"
    assert not made.trees.reading, "a prompt is thought to be read on"
    assert len(made.clock.open) <= 1, "moments of old steps are kept"


def test_greedy_and_sampled_requests_share_a_batch(target, plain, monkeypatch):
    made = make_worker(target, monkeypatch, adaptive=False, drafter="recurrent")
    check(write(made, 1.0, mixed=True)[0], plain)


def test_the_engines_own_rule(target, plain, monkeypatch):
    texts = [p + plain[0.0, seed] for seed, p in enumerate(PROMPTS)]
    known = {"drafter_is": KnowingDrafter(texts), "drafter": "recurrent"}
    made = make_worker(target, monkeypatch, adaptive=False, rule="sglang", **known)
    assert type(made.model_runner.sampler) is stub.Sampler
    requests, run = write(made, 0.0, slots=2)
    check(requests, plain)
    assert sum(run.accepted) > 6


@pytest.mark.parametrize("shape", ["2x2", "4x4", "8x5:20"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_shape_sets_the_size_of_the_largest_tree(target, plain, monkeypatch, shape, adaptive):
    made = make_worker(target, monkeypatch, width=None, shape=shape, adaptive=adaptive)
    assert made.widths[0] == Shape.of(shape).budget + 1
    check(write(made, 0.0, prompts=PROMPTS[:2])[0], plain)


def test_ranks_follow_the_first_one(target, plain, monkeypatch):
    """What is sent between ranks is put together again as it was."""
    made = make_worker(target, monkeypatch, adaptive=False)
    made.ranks.size = 2
    check(write(made, 1.0, prompts=PROMPTS[:2])[0], plain)


def test_texts_do_not_depend_on_the_size_of_tree(target, plain, monkeypatch):
    """Sizes change from step to step: trees are cut, filled up, and left out."""
    made = make_worker(target, monkeypatch)
    chance = random.Random(3)
    made.chooser.choose = lambda rows: chance.randrange(len(made.widths))
    requests, run = write(made, 1.0, slots=3)
    check(requests, plain)
    assert set(run.sizes) == set(made.widths) == {8, 4, 1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_passes_and_drafting(target, plain, monkeypatch, temperature):
    """Batches are padded to recorded sizes; a batch above them runs as it is."""
    replays = []

    def record(actions, memory):
        (action,) = actions
        action()
        return [SimpleNamespace(replay=lambda: (replays.append(1), action()), pool=lambda: "pool")]

    monkeypatch.setattr(recorded, "recorded", record)
    made = make_worker(target, monkeypatch, batches=(1, 3))
    chance = random.Random(3)
    made.chooser.choose = lambda rows: chance.choice(made.chooser.usable(rows))
    requests, run = write(made, temperature, slots=4, retract={"request-0": 4})
    check(requests, plain)
    assert replays
    assert {samples for *_, samples in made.recorded.graphs} == {False, True}
    assert made.target_worker.recorded > 0
    assert made.server_args.cuda_graph_config.decode.bs == [1, 3]
    assert set(run.sizes) == {8, 4, 1}


def test_sampled_drafting_with_too_much_noise_is_not_recorded(target, plain, monkeypatch):
    monkeypatch.setattr(recorded, "recorded", lambda actions, _: [SimpleNamespace(replay=actions[0], pool=lambda: 0)])
    monkeypatch.setattr(recorded, "MOST_NOISE", 3 * VOCAB)  # two positions and the one after them, for one request
    made = make_worker(target, monkeypatch, batches=(1, 3))
    sampled = {(batch, made.widths[size]) for batch, size, samples in made.recorded.graphs if samples}
    assert sampled == {(1, 4)}
    check(write(made, 1.0, slots=3)[0], plain)


def test_what_cannot_be_recorded_runs_eagerly(target, plain, monkeypatch, caplog):
    """Greedy batches are recorded first: they keep their recordings where sampled ones find no memory."""

    def record(actions, _):
        if actions[0].args[-1]:
            raise RuntimeError("out of memory")
        return [SimpleNamespace(replay=actions[0], pool=lambda: 0)]

    monkeypatch.setattr(recorded, "recorded", record)
    made = make_worker(target, monkeypatch, batches=(1, 3))
    assert made.recorded.graphs.keys() == {(batch, size, False) for batch in (1, 3) for size in range(3)}
    assert "recorded for 6 of 10 batches, not for the others: out of memory" in caplog.text
    check(write(made, 1.0, slots=3)[0], plain)


def test_drafting_after_prompts_is_recorded(target, plain, monkeypatch):
    """Else the launches of its kernels would take longer than the prompt, and new numbers of rows be compiled."""
    kinds, prompts = [], []

    def record(actions, memory):
        return [SimpleNamespace(replay=actions[0], pool=lambda: "pool")]

    monkeypatch.setattr(recorded, "recorded", record)
    made = make_worker(target, monkeypatch, batches=(1, 4))
    made.chooser.most_tokens = 16  # two requests with the largest tree
    follow, read, call = TreeBatch.follow, TreeBatch.read, recorded.RecordedFollow.__call__

    def noted(self, requests, tokens, count, hidden, size):
        kinds.append((len(count), size))
        follow(self, requests, tokens, count, hidden, size)

    def usable(self, requests, tokens, count, hidden, size):
        assert size in made.chooser.usable(len(count))
        call(self, requests, tokens, count, hidden, size)

    def counted(self, pieces, *rest):
        prompts.append((len(pieces), len(kinds)))
        return read(self, pieces, *rest)

    monkeypatch.setattr(TreeBatch, "follow", noted)
    monkeypatch.setattr(TreeBatch, "read", counted)
    monkeypatch.setattr(recorded.RecordedFollow, "__call__", usable)
    check(write(made, 0.0, slots=3, chunk=200)[0], plain)
    assert max(prompts)[0] > 2
    assert all(kinds[at][0] >= rows for rows, at in prompts), "each prompt is drafted for"
    assert {(*kind, False) for kind in kinds} <= made.recorded.graphs.keys()


def test_attention_is_recorded_with_tiles_of_the_trees_size(target, monkeypatch):
    """Of SGLang's own tile (128 queries, 8 warps) only the queries and warps change, and only during the recording."""
    made = make_worker(target, monkeypatch, width=64, batches=(1,), graphs=False)
    assert [graphs.tiles for _, graphs in made.runners.states] == [
        (128, 0, 128, queries, 64, warps) for queries, warps in ((128, 8), (32, 4), (16, 4), (16, 4), (16, 4), (16, 4))
    ]
    after = stub.GraphRunner(made.model_runner, speculative_num_draft_tokens=64)
    assert after.tiles == (128, 0, 128, 128, 64, 8)


def test_a_batch_above_the_recorded_ones(target, monkeypatch):
    """Its mask may be longer than the room of recorded passes."""
    prompts = [[*p, *range(20)] for p in PROMPTS]
    texts = []
    for batches in ((), (1,)):
        made = make_worker(target, monkeypatch, batches=batches, graphs=False)
        requests, _ = write(made, 0.0, prompts=prompts, slots=5, chunk=200)
        texts.append([r.output_ids for r in requests])
    assert texts[0] == texts[1]


def test_returned_hidden_states(target, plain, monkeypatch):
    """A request that asks for hidden states gets those that chose its tokens, whatever the tree looked like."""
    texts = [p + plain[0.0, seed] for seed, p in enumerate(PROMPTS)]
    made = make_worker(target, monkeypatch, adaptive=False, drafter_is=KnowingDrafter(texts), drafter="recurrent")
    requests, run = write(made, 0.0, slots=2, returns_hidden=True)
    assert sum(run.accepted) > 6
    for req in requests:
        tokens = torch.tensor([req.origin_input_ids + req.output_ids[:-1]])
        states = target.states(tokens, (-1,))[0, len(req.origin_input_ids) :]
        assert torch.allclose(torch.stack(req.hidden[: len(states)]), states)
        assert torch.allclose(torch.stack(req.read), target.states(torch.tensor([req.origin_input_ids]), (-1,))[0])


def test_the_state_is_that_of_the_whole_text(target, monkeypatch):
    """A prompt in pieces gives the memory of the prompt at once; a cached prefix is missing in it."""
    made = make_worker(target, monkeypatch, adaptive=False)

    def memory(chunk: int, **given):
        write(made, 0.0, prompts=PROMPTS[:1], chunk=chunk, **given)
        return made.trees.state.inner.memory[1].clone()

    whole = memory(64)
    assert torch.allclose(memory(3), whole, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(memory(64, cached={"request-0": 4}), whole)


def test_hidden_states_of_earlier_layers(target, monkeypatch):
    """The drafter gets what redrafter's own target gives, with and without earlier layers."""
    tokens = torch.tensor([PROMPTS[0]])
    for layers in ((-1,), (1,), (1, -1), (-1, 1), (2, 1)):
        stub.install(monkeypatch)
        model = stub.TargetWorker(target.model).model_runner.model
        found = HiddenStates(model, layers, target.layer_count, "toy")(model(tokens)[1][0])
        assert torch.allclose(found, target.states(tokens, layers)[0])
    with pytest.raises(UnsupportedTarget, match=r"reads layers \[0, -1\], but SGLang's Model for toy does not give"):
        HiddenStates(stub.Model(target.model), (0, -1), target.layer_count, "toy")
    with pytest.raises(UnsupportedTarget, match="train one with --layers -1"):
        HiddenStates(torch.nn.Module(), (1, -1), target.layer_count, "toy")


def test_warming_up_uses_the_spare_slot_alone(target, monkeypatch):
    """And no more rows than SGLang runs at once: a batch's logits take much memory."""
    made = make_worker(target, monkeypatch)
    trees, rows = made.trees, []
    accept = trees.accept
    monkeypatch.setattr(trees, "accept", lambda given, *rest: (rows.append(len(given.slots)), accept(given, *rest)))
    kept = [*tensors_of(trees.state), *trees.kept]
    for x in kept:
        x.fill_(1)
    made.recorded.warm_up(made.chooser.usable)
    assert all(bool((x[: trees.spare] == 1).all()) for x in kept)
    assert not all(bool((x == 1).all()) for x in kept), "the twin: something was drafted"
    assert set(rows) == {1, 3}
    assert trees.spare < recorded.BATCHES[-1]


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_accepted_nodes_are_moved_in_small_calls(rows):
    """Into the slots after the text; none is overwritten before it is read."""
    generator, nodes, depth = torch.Generator().manual_seed(rows), 8, 5
    slots = torch.randperm(1000, generator=generator)[: rows * nodes].view(rows, nodes)
    path = torch.zeros(rows, depth, dtype=torch.long)
    for row in path:
        taken = 1 + torch.randperm(nodes - 1, generator=generator)[: int(torch.randint(depth, (), generator=generator))]
        row[1 : 1 + len(taken)] = taken.sort().values
    cache = stub.KvCache()
    cache.tokens = torch.arange(1000)
    calls = []
    move = cache.move_kv_cache
    cache.move_kv_cache = lambda places, sources: (calls.append(len(places)), move(places, sources))
    verify_input.move_accepted(cache, slots, path)
    accepted = path[:, 1:] > 0
    assert torch.equal(cache.tokens[slots[:, 1:depth]][accepted], slots.gather(1, path[:, 1:])[accepted])
    assert max(calls) <= verify_input.TOGETHER
    assert sum(calls) == rows * (depth - 1)


def test_states_of_earlier_requests_stay_out(target, monkeypatch):
    """A state that is not a number, in a request's step, does not reach the memory of a later prompt."""
    monkeypatch.setattr(recorded, "recorded", lambda actions, _: [SimpleNamespace(replay=actions[0], pool=lambda: 0)])
    made = make_worker(target, monkeypatch, batches=(3,), adaptive=False)
    made.recorded.inputs[3].hidden.fill_(torch.nan)
    write(made, 0.0, prompts=PROMPTS[:1])
    assert made.trees.state.inner.memory[1].isfinite().all()


def test_every_kind_of_move_is_compiled_at_the_start(target, monkeypatch):
    moves = []
    monkeypatch.setattr(stub.KvCache, "move_kv_cache", lambda self, *move: moves.append(move))
    make_worker(target, monkeypatch)
    assert [len(places) for places, _ in moves] == [1, 2, 4, 8, 9], "the stub runs 9 requests at most"
    moves.clear()
    verify_input.warm_up_moves(stub.KvCache(), 40, "cpu")
    assert [len(places) for places, _ in moves] == [1, 2, 4, 8, 15, 16, 31, 32]
    assert all((places == sources).all() for places, sources in moves), "nothing is moved"


class TestTwins:
    """What must not be done changes the texts, so that the tests above notice it."""

    def test_all_depths_moved_at_once(self, target, plain, monkeypatch):
        texts = [p + plain[0.0, seed] for seed, p in enumerate(PROMPTS)]
        known = {"drafter_is": KnowingDrafter(texts), "drafter": "recurrent"}
        made = make_worker(target, monkeypatch, adaptive=False, **known)

        def at_once(kv_cache, slots, path):
            most = min(path.shape[1], slots.shape[1])
            kv_cache.move_kv_cache(slots[:, 1:most].flatten(), slots.gather(1, path[:, 1:most]).flatten())

        monkeypatch.setattr(worker, "move_accepted", at_once)
        with pytest.raises(AssertionError):
            check(write(made, 0.0, slots=2)[0], plain)

    def test_noise_by_step(self, target, plain, monkeypatch):
        made = make_worker(target, monkeypatch, adaptive=False)
        accept, steps = TreeBatch.accept, iter(range(10**6))

        def by_step(self, requests, size, tree, logits):
            lengths = torch.full_like(requests.lengths, next(steps))
            return accept(
                self, type(requests)(requests.slots, lengths, requests.seeds, requests.sampling), size, tree, logits
            )

        monkeypatch.setattr(TreeBatch, "accept", by_step)
        with pytest.raises(AssertionError):
            check(write(made, 1.0, prompts=PROMPTS[:2])[0], plain)

    def test_first_token_by_the_engines_own_draw(self, target, plain, monkeypatch):
        made = make_worker(target, monkeypatch, adaptive=False)
        made.model_runner.sampler = stub.Sampler()
        with pytest.raises(AssertionError):
            check(write(made, 1.0, prompts=PROMPTS[:2])[0], plain)

    def test_causal_mask(self, target, plain, monkeypatch):
        made = make_worker(target, monkeypatch, adaptive=False)
        full = verify_input.full_mask
        monkeypatch.setattr(verify_input, "full_mask", lambda mask, *rest: full(torch.ones_like(mask).tril(), *rest))
        with pytest.raises(AssertionError):
            check(write(made, 0.0)[0], plain)

    def test_a_state_that_is_not_reset_costs_guesses_only(self, target, plain, monkeypatch):
        made = make_worker(target, monkeypatch, adaptive=False)
        monkeypatch.setattr(TreeBatch, "_before", lambda self, goes_on, slots: self._rows(slots))
        check(write(made, 1.0, retract={"request-0": 6}, prompts=PROMPTS[:3], slots=2)[0], plain)


class TestRefusals:
    def test_version(self, monkeypatch):
        stub.install(monkeypatch, version="0.5.23")
        with pytest.raises(ConfigError, match=r"tested with SGLang 0\.5\.16, not with 0\.5\.23"):
            checks.check(server_args())

    def test_hidden_states_not_asked_for(self, monkeypatch):
        stub.install(monkeypatch)
        with pytest.raises(UnsupportedTarget, match="--enable-return-hidden-states"):
            checks.check(server_args(enable_return_hidden_states=False))

    def test_hidden_states_not_returned(self, target, monkeypatch):
        made = make_worker(target, monkeypatch)
        made.target_worker.returns_hidden = False
        with pytest.raises(UnsupportedTarget, match="returned no hidden states"):
            write(made, 0.0)

    def test_wrong_drafters(self, target, monkeypatch, tmp_path):
        stub.install(monkeypatch)
        own = SglangTarget(stub.TargetWorker(target.model).model_runner, None, "toy")
        with pytest.raises(DrafterMismatch, match="no drafter comes with the package for toy"):
            drafter_for("recurrent", own)
        for wrong in ("", "ngram", "none"):
            with pytest.raises(
                ConfigError,
                match=f"SGLang takes no drafter '{wrong}': give auto, recurrent, recurrent.ngram, or a folder",
            ):
                drafter_for(wrong, own)
        with pytest.raises(ModelNotFound, match=r"no drafter '\./missing': no such folder here"):
            drafter_for("./missing", own)
        peer = peer_drafter("medusa", target)
        from redrafter.drafters import checkpoint

        checkpoint.write(tmp_path / "medusa", peer.net, target)
        with pytest.raises(ConfigError, match="is no recurrent drafter"):
            drafter_for(str(tmp_path / "medusa"), own)
        recurrent_drafter(target).save(tmp_path / "right", target)
        assert drafter_for(str(tmp_path / "right"), own).layers == (-1,)
