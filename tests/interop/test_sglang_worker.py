"""What the plug-in for SGLang hands to the engine beside the texts, and what it takes from it."""

import random
from types import SimpleNamespace

import pytest
import torch

from redrafter.core.accept import Accepted
from redrafter.interop.sglang import recorded, settings, worker
from redrafter.interop.sglang.clock import StepClock
from redrafter.interop.sglang.sizes import SizedRunners
from redrafter.interop.sglang.target import SglangTarget
from redrafter.interop.sglang.trees import TreeBatch
from redrafter.targets import load_target
from tests.helpers import sglang_engine
from tests.helpers import sglang_stub as stub
from tests.helpers.sglang_worker import KnowingDrafter, check, make_worker, plain_texts, write
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


@pytest.fixture(scope="module")
def plain(target):
    return plain_texts(target)


LONG = [*([i, *[j * 7 % VOCAB for j in range(71 + i)]] for i in range(4)), [7]]


@pytest.fixture(scope="module")
def plain_to_the_end(target):
    return plain_texts(target, LONG, 24)


def knowing(texts: list[list[int]]) -> dict:
    return {"drafter_is": KnowingDrafter(texts), "drafter": "recurrent"}


@pytest.fixture
def replays(monkeypatch):
    """Recordings of drafting that run again what they recorded; the list grows with each replay."""
    found = []

    def record(actions, memory):
        return [SimpleNamespace(replay=lambda: (found.append(1), actions[0]()), pool=lambda: "pool")]

    monkeypatch.setattr(recorded, "recorded", record)
    return found


@pytest.mark.parametrize(("adaptive", "width", "sizes"), [(True, 4, {4, 1}), (False, 4, {4, 1}), (True, 8, {4, 1})])
def test_no_position_past_the_models_last(target, plain_to_the_end, monkeypatch, adaptive, width, sizes):
    """Texts up to the end of the context, and a short one: near it the largest tree that fits is verified."""
    texts = [p + plain_to_the_end[0.0, seed] for seed, p in enumerate(LONG)]
    made = make_worker(target, monkeypatch, width=width, adaptive=adaptive, **knowing(texts))
    made.chooser.choose = lambda rows: 0
    requests, run = write(made, 0.0, prompts=LONG, tokens=24, slots=5, chunk=400)
    check(requests, plain_to_the_end)
    assert {len(r.origin_input_ids + r.output_ids) for r in requests[:4]} == {stub.CONTEXT}
    assert set(run.sizes) == sizes


def test_images_have_numbers_above_the_vocabulary(target, monkeypatch):
    """SGLang puts such numbers in the place of an image; the drafter has no embeddings for them."""
    made = make_worker(target, monkeypatch)
    request = SimpleNamespace(full_untruncated_fill_ids=[1, 1_000_123, 2], req_pool_idx=1, rid="a")
    piece = made._piece(SimpleNamespace(chunked_req=None), request, 0, 3)
    assert piece.text.tolist() == [1, VOCAB - 1, 2]


def test_every_size_of_tree_is_told_what_it_gave(target, plain, monkeypatch):
    """Results come a step late, when the size of tree may be another one."""
    texts = [p + plain[0.0, seed] for seed, p in enumerate(PROMPTS)]
    made = make_worker(target, monkeypatch, **knowing(texts))
    chance, told, given = random.Random(3), [], []
    made.chooser.choose = lambda rows: chance.randrange(3)
    monkeypatch.setattr(made.chooser, "accepted", lambda size, tokens: told.append((made.widths[size], tokens)))
    result = made._result
    made._result = lambda *x: (given.append(x[2].double().mean().item()), result(*x))[1]
    _, run = write(made, 0.0, chunk=200, slots=5)
    steps = given[1:]  # after the prompts
    assert [width for width, _ in told] == run.sizes[: len(told)]
    assert [tokens for _, tokens in told] == pytest.approx(steps[: len(told)])
    assert len(told) >= len(steps) - 1
    assert max(tokens for _, tokens in told) > 1.5


def test_step_times_are_those_of_the_device(target, plain, monkeypatch):
    """By batch size and size of tree, without the time that prompts take."""
    made = make_worker(target, monkeypatch)
    device = SimpleNamespace(now=0.0)

    class Moment:
        def __init__(self) -> None:
            self.at = device.now

        def passed(self) -> bool:
            return True

        def since(self, earlier: "Moment") -> float:
            return self.at - earlier.at

    made.clock, run = StepClock(Moment), made.target_worker.forward_batch_generation

    def timed(batch, **asked):
        device.now += 10 * made.widths[made.clock.step[1]] + len(batch.reqs) if asked.get("is_verify") else 1000.0
        return run(batch, **asked)

    made.target_worker.forward_batch_generation = timed
    chance = random.Random(3)
    made.chooser.choose = lambda rows: chance.randrange(3)
    write(made, 0.0, slots=3)
    found = {(rows, made.widths[size]): set(t) for (rows, size), t in made.chooser.times.items()}
    assert {rows for rows, _ in found} == {2, 4}
    assert {width for _, width in found} == {8, 4, 1}
    assert all(t == {10.0 * width + min(rows, 3)} for (rows, width), t in found.items())


def test_more_requests_get_the_largest_tree_that_they_can(target, plain, monkeypatch):
    """If the size was chosen for fewer."""
    made = make_worker(target, monkeypatch)
    made.chooser.most_tokens, made.chooser.choose = 16, lambda rows: 0
    began, sizes = made.clock.began, []
    made.clock.began = lambda rows, size: (sizes.append((rows, made.widths[size])), began(rows, size))
    write(made, 0.0, slots=4)
    assert set(sizes) >= {(2, 8), (4, 4)}
    assert all(width == (8 if rows < 3 else 4) for rows, width in sizes)


def test_more_requests_than_were_recorded_get_no_tree(target, monkeypatch):
    """The engine would run their pass without a recording."""
    made = make_worker(target, monkeypatch, batches=(1, 2), graphs=False)
    began, sizes = made.clock.began, []
    made.clock.began = lambda rows, size: (sizes.append((rows, made.widths[size])), began(rows, size))
    made.chooser.choose = lambda rows: made.chooser.usable(rows)[0]
    write(made, 0.0, slots=4)
    assert set(sizes) >= {(1, 8), (4, 1)}
    assert all(width == 1 for rows, width in sizes if rows > 2)


def test_a_second_rank_does_what_the_first_does(target, plain, monkeypatch):
    """Although it would draft, accept and choose sizes otherwise. The first does what one alone does."""
    sent = []

    def steps(number: int, ranks: int, broadcast, **given) -> tuple:
        group = SimpleNamespace(world_size=ranks, broadcast=broadcast, all_gather=lambda rows, dim: rows)
        monkeypatch.setattr(stub, "GROUP", group)
        made = make_worker(target, monkeypatch, ranks=ranks, **given)
        chance = random.Random(number)
        made.chooser.choose = lambda rows: chance.randrange(3)
        if number:
            accept = made.trees.accept
            made.trees.accept = lambda *x: Accepted(*(1 - y for y in vars(accept(*x)).values()))
        verify, seen = made.target_worker._verify, []
        made.target_worker._verify = lambda batch: (seen.append(batch.input_ids.tolist()), verify(batch))[1]
        requests, run = write(made, 1.0, slots=3)
        check(requests, plain)
        return seen, run.accepted

    def receive(values, src):
        assert src == 0
        values.copy_(sent.pop(0))

    first = steps(0, 2, lambda values, src: sent.append(values.clone()))
    assert steps(1, 2, receive, drafter_is=recurrent_drafter(target, exit_size=8)) == first
    assert not sent
    assert steps(0, 1, None) == first
    assert sum(first[1]) > 6


def test_split_embeddings_are_put_together(target, monkeypatch):
    """Each rank holds some rows; the last rank's are padded."""
    stub.install(monkeypatch)
    runner = stub.TargetWorker(target.model).model_runner
    whole = runner.model.head.weight.data
    for part in (runner.model.embedding, runner.model.head):
        part.weight.data = part.weight.data[: VOCAB // 2]
    group = SimpleNamespace(world_size=2, all_gather=lambda rows, dim: torch.cat([whole, whole[:3]], dim))
    monkeypatch.setattr(stub, "GROUP", group)
    own = SglangTarget(runner, None, "toy")
    assert own.vocab_size == VOCAB
    assert torch.equal(own.output_embedding.weight, whole)


@pytest.mark.parametrize(("rule", "temperature"), [("seeded", 0.0), ("seeded", 1.0), ("sglang", 0.0)])
def test_log_probabilities(target, plain, monkeypatch, rule, temperature):
    """Those of the text's tokens, whatever the tree looked like."""
    texts = [p + plain[temperature, seed] for seed, p in enumerate(PROMPTS)]
    made, chance = make_worker(target, monkeypatch, rule=rule, **knowing(texts)), random.Random(3)
    made.chooser.choose = lambda rows: chance.choice((0, 0, 1, 2))
    requests, run = write(made, temperature, slots=2, returns_logprobs=True)
    check(requests, plain)
    assert sum(run.accepted) > 6
    for req in requests:
        text = torch.tensor(req.origin_input_ids + req.output_ids)
        scores = made.target_worker.run([text.tolist()])[0][0].log_softmax(-1)
        wanted = scores[:-1].gather(1, text[1:, None])[len(req.origin_input_ids) :, 0]
        torch.testing.assert_close(torch.tensor(req.logprobs).double()[: len(wanted)], wanted)


def test_log_probabilities_have_the_requests_biases(target, monkeypatch):
    """Those of the distribution that the tokens were chosen from."""
    made = make_worker(target, monkeypatch, adaptive=False)
    bias = torch.zeros(VOCAB)
    bias[3] = 50.0
    batch = sglang_engine.Engine._batch

    def biased(self, mode, reqs, lengths):
        made_ = batch(self, mode, reqs, lengths)
        made_.sampling_info.logit_bias = bias.expand(len(reqs), -1)
        return made_

    monkeypatch.setattr(sglang_engine.Engine, "_batch", biased)
    requests, _ = write(made, 0.0, prompts=PROMPTS[:2], returns_logprobs=True)
    for req in requests:
        assert set(req.output_ids[1:]) == {3}
        assert max(req.logprobs) <= 0.0
        assert min(req.logprobs) > -1e-3, "as unlikely as without the bias"


@pytest.mark.parametrize("rule", ["seeded", "sglang"])
def test_a_grammar_holds_at_every_node(target, monkeypatch, rule):
    """Odd and even tokens take turns: the text is what the target writes under this rule."""
    own, texts = stub.TargetWorker(target.model), []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(12):
            logits = own.run([text])[0][0, -1]
            text.append(int(logits.masked_fill(~stub.Grammar.allowed(torch.tensor(text[-1])), -torch.inf).argmax()))
        texts.append(text)
    made = make_worker(target, monkeypatch, adaptive=False, rule=rule, **knowing(texts))
    requests, run = write(made, 0.0, slots=3, grammar=True)
    for req, text in zip(requests, texts, strict=True):
        assert req.output_ids == text[len(req.origin_input_ids) :][: req.max_new_tokens]
    assert sum(run.accepted) > 6


def test_recorded_drafting_guesses_what_eager_drafting_does(target, plain, monkeypatch, replays):
    """Greedy and sampled requests in batches that do not fill their recordings."""
    found = []
    for graphs in (False, True):
        made = make_worker(target, monkeypatch, batches=(1, 2, 5), graphs=graphs, adaptive=False)
        requests, run = write(made, 1.0, mixed=True, slots=4)
        check(requests, plain)
        found.append((run.accepted, made.trees.state.inner.memory[1:5].clone()))
        assert bool(replays) is graphs, "a user can turn recordings off"
    assert found[0][0] == found[1][0]
    assert sum(found[0][0]) > 6
    torch.testing.assert_close(found[0][1], found[1][1])


def test_every_step_uses_the_smallest_recording(target, monkeypatch, replays):
    made = make_worker(target, monkeypatch, batches=(1, 2, 5))
    follow, ran = TreeBatch.follow, []
    monkeypatch.setattr(TreeBatch, "follow", lambda self, *x: (ran.append(len(x[2])), follow(self, *x)))
    chance = random.Random(3)
    made.chooser.choose = lambda rows: chance.randrange(3)
    write(made, 1.0, slots=4)
    assert len(replays) == len(ran), "also where sampled requests draft nothing"
    assert set(ran) == {1, 2, 5}
    fitting = [[made.recorded.batch_for(rows, 0, samples) for rows in range(1, 7)] for samples in (False, True)]
    assert fitting == [[1, 2, 5, 5, 5, 0]] * 2


def test_the_engines_own_rule_uses_greedy_recordings(target, monkeypatch, replays):
    """Its guesses are not drawn with our noise."""
    made = make_worker(target, monkeypatch, batches=(1, 2, 5), rule="sglang", adaptive=False)
    _, run = write(made, 1.0, slots=4)
    assert len(replays) > len(run.sizes)


def test_a_prompt_that_is_read_anew_begins_with_an_empty_memory(target, monkeypatch):
    """Under the same name and in the same slot, after a first attempt that ended within the prompt."""
    memories = []
    for first in (False, True):
        made = make_worker(target, monkeypatch, adaptive=False)
        if first:
            run = sglang_engine.Engine(made, chunk=3)
            run.waiting = [sglang_engine.Req("request-0", PROMPTS[0][::-1], sglang_engine.Params(), 1)]
            run.extend()
            assert made.trees.reading
        write(made, 0.0, prompts=PROMPTS[:1], chunk=3)
        memories.append(made.trees.state.inner.memory[1].clone())
    torch.testing.assert_close(*memories)


def test_prompts_in_pieces_beside_others(target, monkeypatch):
    """A pass reads the end of one prompt and the beginning of another: each gets its own memory."""
    found = []
    for chunk in (5, 200):
        made = make_worker(target, monkeypatch, adaptive=False)
        read, memories, together = made.trees.read, {}, []

        def noted(pieces, *rest, made=made, read=read, memories=memories, together=together):
            result = read(pieces, *rest)
            together.append({p.start > 0 for p in pieces})
            memories.update({p.request: made.trees.state.inner.memory[p.slot].clone() for p in pieces})
            return result

        made.trees.read = noted
        write(made, 0.0, chunk=chunk)
        found.append(memories)
        assert ({False, True} in together) is (chunk == 5)
    for name, memory in found[0].items():
        torch.testing.assert_close(memory, found[1][name])


def test_texts_longer_than_the_window_of_ngrams(target, plain, monkeypatch):
    """The window holds the end of a prompt. A text that fills it goes on at its end."""
    monkeypatch.setattr(worker, "NGRAM_WINDOW", 8)
    made = make_worker(target, monkeypatch, adaptive=False)
    read, ends = made.trees.read, []

    def noted(pieces, *rest):
        found = read(pieces, *rest)
        for p in pieces:
            ends.append((made.trees.state.text.tokens[p.slot, :4].tolist(), p.text.tolist()))
        return found

    made.trees.read = noted
    check(write(made, 0.0, chunk=200)[0], plain)
    assert any(len(text) > 8 for _, text in ends)
    assert all(kept[: len(text)] == text[-4:] for kept, text in ends)
    assert made.trees.state.text.lengths.max() == 8


def test_settings_reach_the_drafter(target, monkeypatch):
    made = make_worker(target, monkeypatch, shape="3x4", drafter="recurrent")
    assert (made.trees.shapes[0].width, made.trees.shapes[0].length, made.trees.nodes) == (3, 4, 8)
    assert made.widths == [8, 4, 1]
    fixed = make_worker(target, monkeypatch, adaptive=False)
    assert (fixed.widths, fixed.chooser.usable(9)) == ([8, 1], [0, 1])
    fixed.chooser.choose = lambda rows: pytest.fail("the size is fixed")
    assert set(write(fixed, 0.0)[1].sizes) == {8}


@pytest.mark.parametrize(
    ("setting", "backend", "copies"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_lengths_on_the_host(target, monkeypatch, setting, backend, copies):
    """Copied if the attention backend needs them, or if the user says so."""
    made = make_worker(target, monkeypatch)
    monkeypatch.setattr(worker, "_host_lengths", None)
    made.settings = settings.Settings(host_lengths=setting)
    made.model_runner.attn_backend.needs_cpu_seq_lens = backend
    made.init_attention_backends()
    assert stub.ALGORITHMS["REDRAFTER"].create_future_map("cpu", "pool")[3] is copies


def test_new_weights_reach_the_model(target, monkeypatch):
    made = make_worker(target, monkeypatch)
    made.target_worker.update_weights_from_tensor = lambda asked: (asked == "new", "said the model")
    assert made.update_weights_from_tensor("new") == (True, "said the model")


def test_smaller_trees_leave_the_engines_settings_as_they_were(target, monkeypatch):
    """Each size is recorded for the batches that are not too large for it, with a workspace of its own."""
    made = make_worker(target, monkeypatch, width=16, batches=(1, 4, 8), graphs=False)
    runner, args = made.model_runner, made.server_args
    found = SizedRunners(runner, args, [16, 8, 4, 1], most_tokens=32).states
    assert [graphs.capture_bs for _, graphs in found] == [[1, 4, 8], [1, 4], [1, 4, 8], [1, 4, 8]]
    assert all(backend.own_workspace for backend, _ in found[1:])
    assert args.speculative_num_draft_tokens == 16
    assert args.cuda_graph_config.decode.bs == [1, 4, 8]
    assert runner.init_new_workspace is False
