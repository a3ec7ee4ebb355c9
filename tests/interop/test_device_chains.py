"""Chains for an engine that keeps its texts on the device: they are those of the whole text, in any schedule."""

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.drafters.recurrent.chain import ChainDrafter
from redrafter.drafters.recurrent.chain_slots import ChainSlots
from redrafter.drafters.recurrent.drafter import RecurrentState
from redrafter.errors import ConfigError
from redrafter.interop.vllm import speculator
from redrafter.interop.vllm.device_chains import DeviceChains, Reading, Texts
from redrafter.interop.vllm.measured_depths import MeasuredDepths
from redrafter.interop.vllm.speculator import reading_of
from redrafter.runtime.graph import unrecorded
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter

LENGTH, SLOTS, LONGEST = 3, 3, 48


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


@pytest.fixture(scope="module")
def drafter(target):
    parts = {"layers": (1, -1), "context_size": 64, "first_state": "context", "memory_heads": 2, "memory_size": 8}
    return recurrent_drafter(target, **parts)


@pytest.fixture(scope="module")
def texts(target, drafter):
    plain = Engine(target, drafter).plain()
    written = plain.generate(PROMPTS, max_new_tokens=20)
    return [([*p], [*p, *c.tokens]) for p, c in zip(PROMPTS, written, strict=True)]


def hidden(target, drafter, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return target.states(torch.tensor([tokens]), drafter.layers)[0]


@torch.no_grad()
def expected(target, drafter, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    whole, states = torch.tensor([tokens]), hidden(target, drafter, tokens[:-1])[None]
    memory = drafter.remember(drafter.net.memory.empty(1), whole[:, 1:], states, torch.tensor([len(tokens) - 1]))
    search = ChainDrafter(drafter, Shape(width=1, length=LENGTH)).slots.search
    tree = drafter.draft(RecurrentState(drafter.net.context(states[:, -1]), memory), whole[:, -1], search)
    return tree.tokens[0, 1:].tolist(), memory[0]


class StubRunner:
    """Schedules as vLLM's second runner: prompts in pieces beside steps, slots that are used again."""

    def __init__(self, target, drafter, chains: DeviceChains, texts, seed: int) -> None:
        self.target, self.drafter, self.chains = target, drafter, chains
        self.random, self.waiting = random.Random(seed), [*texts, *texts]
        self.slots: dict[int, SimpleNamespace] = {}

    def step(self, draft: bool = True, clear: bool = True):
        """One pass. Returns the slots that have chosen a token, with the guesses for each."""
        fresh = []
        for slot in range(SLOTS):
            if slot not in self.slots and self.waiting:
                prompt, truth = self.waiting.pop()
                self.slots[slot] = SimpleNamespace(truth=truth, decided=len(prompt), computed=0, guesses=[])
                self.chains.texts.tokens[slot, : len(prompt)] = torch.tensor(prompt)
                self.chains.texts.lengths[slot] = len(prompt)
                fresh.append(slot)
        rows = self.random.sample(sorted(self.slots), self.random.randint(1, len(self.slots)))
        rows = [*rows, *(s for s in fresh if s not in rows)]
        first, count, states, reading, at = [], [], [], [], 0
        for i, slot in enumerate(rows):
            mine = self.slots[slot]
            if mine.computed < mine.decided - 1 or slot in fresh:
                size = min(self.random.randint(1, 9), mine.decided - mine.computed)
                given, gained = mine.truth[mine.computed : mine.computed + size], 0
                reading.append(Reading(i, slot, at, mine.computed, size))
                start, mine.computed = mine.computed, mine.computed + size
                gained = int(mine.computed == mine.decided)
            else:
                start, guesses = mine.computed, mine.guesses
                given = [mine.truth[start], *guesses]
                after = mine.truth[mine.decided :]
                right = next((k for k, g in enumerate(guesses) if after[k : k + 1] != [g]), len(guesses))
                gained = min(right + 1, len(after))
                mine.computed += gained
            before = mine.truth[:start]
            states.append(hidden(self.target, self.drafter, before + given)[start:])
            new = mine.truth[mine.decided : mine.decided + gained]
            length = int(self.chains.texts.lengths[slot])
            self.chains.texts.tokens[slot, length : length + len(new)] = torch.tensor(new)
            self.chains.texts.lengths[slot] += len(new)
            mine.decided += len(new)
            first.append(at)
            count.append(gained)
            at += len(given)
        given = (torch.tensor(rows, dtype=torch.int32), torch.tensor(first), torch.tensor(count), torch.cat(states))
        found = self.chains.step(*given, fresh if clear else [], reading, draft).tolist()
        done = []
        for slot, gained, guesses in zip(rows, count, found, strict=True):
            mine = self.slots[slot]
            mine.guesses = guesses if draft else []
            if gained:
                done.append((slot, mine, guesses))
            if mine.decided + LENGTH + 1 >= len(mine.truth):
                del self.slots[slot]
        return done


def make_chains(drafter, ngrams: bool = False) -> DeviceChains:
    slots = ChainSlots(drafter, Shape(width=1, length=LENGTH), SLOTS, ngrams=ngrams)
    texts = Texts(torch.zeros(SLOTS, LONGEST, dtype=torch.int32), torch.zeros(SLOTS, dtype=torch.int32))
    return DeviceChains(slots, texts, [1, SLOTS], record=unrecorded)


@pytest.mark.parametrize("records", [False, True])
def test_any_schedule_gives_the_guesses_of_the_whole_text(target, drafter, texts, records):
    chains = make_chains(drafter)
    if records:
        chains.record()
    runner, seen = StubRunner(target, drafter, chains, texts, 0), 0
    for number in range(40):
        if not (runner.waiting or runner.slots):
            break
        draft = number % 7 != 3
        for slot, mine, guesses in runner.step(draft):
            wanted_guesses, memory = expected(target, drafter, mine.truth[: mine.decided])
            torch.testing.assert_close(chains.slots.memory[slot], memory)
            assert guesses == (wanted_guesses if draft else [0] * LENGTH)
            seen += 1
    assert seen > 20


def test_any_schedule_twin(target, drafter, texts):
    """A slot that is not cleared for its next request is noticed."""
    chains = make_chains(drafter)
    runner, wrong = StubRunner(target, drafter, chains, texts, 0), 0
    for _ in range(40):
        if not (runner.waiting or runner.slots):
            break
        for slot, mine, _ in runner.step(clear=False):
            memory = expected(target, drafter, mine.truth[: mine.decided])[1]
            wrong += not torch.allclose(chains.slots.memory[slot], memory)
    assert wrong


def test_ngrams_copy_a_text_that_repeats(target, drafter):
    start = [3, 8, 5, 9, 2, 7]
    steps = []
    for ngrams in (False, True):
        runner = StubRunner(target, drafter, make_chains(drafter, ngrams), [], 0)
        runner.waiting, taken = [(start * 2, start * 7)], 0
        while runner.waiting or runner.slots:
            runner.step()
            taken += 1
        steps.append(taken)
    assert steps[1] < steps[0]


def test_steps_without_drafting_do_not_count_against_ngrams(target, drafter):
    """In a text that repeats itself, every copied token that a step has decided was right."""
    start = [3, 8, 5, 9, 2, 7]
    chains = make_chains(drafter, ngrams=True)
    runner = StubRunner(target, drafter, chains, [], 0)
    runner.waiting, number, hits = [(start * 2, start * 7)], 0, []
    while runner.waiting or runner.slots:
        runner.step(draft=number % 3 < 2)
        number += 1
        hits.append(chains.slots.hits[0].tolist())
    assert all(right == decided for right, decided in hits)
    assert hits[-1][0] > hits[0][0], "copied tokens were counted"


def test_the_smallest_recording_that_fits(drafter):
    chains, replays = make_chains(drafter), []
    chains.record()
    for kind, graph in list(chains.graphs.items()):
        chains.graphs[kind] = SimpleNamespace(
            replay=lambda kind=kind, graph=graph: (replays.append(kind), graph.replay())
        )
    for rows, draft in ((1, True), (2, True), (3, False), (1, False)):
        hidden = torch.zeros(rows, drafter.net.config.context_size, dtype=torch.float64)
        chains.step(torch.arange(rows), torch.arange(rows), torch.ones(rows), hidden, [], [], draft)
    assert replays == [(1, True), (SLOTS, True), (SLOTS, False), (1, False)]


def test_rows_that_read_a_prompt():
    """A row of one token whose step was filled up with guesses is a step; other rows of a prompt read it."""
    batch = SimpleNamespace(
        idx_mapping_np=[4, 2, 0],
        query_start_loc_np=[0, 5, 12, 16],
        num_computed_prefill_tokens_np=torch.tensor([9, 3, 6]),
        num_scheduled_tokens=torch.tensor([5, 7, 4]),
        is_prefilling_np=[False, True, True],
        num_draft_tokens_per_req=[4, 0, 3],
    )
    assert reading_of(batch) == [Reading(row=1, slot=2, first=5, start=3, count=7)]
    batch.num_draft_tokens_per_req = None
    assert [r.row for r in reading_of(batch)] == [1, 2]


class TestDepths:
    def run(self, cost, accepted: float, rows: int, steps: int = 200, prompts: bool = False) -> list[int]:
        """How many guesses are asked for, on a machine where a step of `width` tokens per request costs `cost`."""
        now = [0.0]
        depths, chosen, width = MeasuredDepths(4, clock=lambda: now[0]), [], 5
        for number in range(steps):
            guesses = depths[rows]
            depths.scheduled([100] if prompts and number % 2 else [width] * rows)
            now[0] += cost(rows, width)
            if width > 1:
                for _ in range(rows):
                    depths.accepted(4, accepted)
            width = guesses + 1
            chosen.append(guesses)
        return chosen[-60:]

    def test_drafts_while_drafting_pays(self):
        def cost(rows, width):
            return 5.0 if width == 1 else 6.0 + 0.3 * rows

        assert self.run(cost, 1.2, 1).count(4) > 50
        assert self.run(cost, 1.2, 32).count(0) > 50

    def test_twin(self):
        """Without a gain in tokens, the same costs end drafting; without measured times, drafting goes on."""

        def cost(rows, width):
            return 5.0 if width == 1 else 6.0 + 0.3 * rows

        assert self.run(cost, 0.0, 1).count(0) > 50
        assert self.run(cost, 1.2, 32, prompts=True).count(4) > 50


class TestSpeculator:
    """The drafter's class for vLLM's second runner, with stubs of what vLLM gives it."""

    @pytest.fixture
    def made(self, target, drafter, monkeypatch):
        base = ModuleType("vllm.v1.worker.gpu.spec_decode.speculator")
        base.BaseSpeculator = object
        monkeypatch.setitem(sys.modules, base.__name__, base)
        monkeypatch.setattr(speculator, "VllmTarget", lambda model, config: SimpleNamespace(layer_count=2))
        monkeypatch.setattr(speculator, "drafter_for", lambda name, target: drafter)
        speculator.make_speculator.cache_clear()
        yield speculator.make_speculator()
        speculator.make_speculator.cache_clear()

    def config(self, **section):
        return SimpleNamespace(
            additional_config={"redrafter": {"runner": 2, "drafter": "recurrent", **section}},
            parallel_config=SimpleNamespace(world_size_across_dp=1, pipeline_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=SLOTS, async_scheduling=True),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=LENGTH, num_speculative_tokens_per_batch_size=None
            ),
            model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        )

    def runner(self):
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.zeros(SLOTS, LONGEST, dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32)),
            req_id_to_index={"a": 1},
            add_request=lambda req_id, all_token_ids: None,
        )
        model = SimpleNamespace(supports_eagle3=True, asked=None)
        model.set_aux_hidden_state_layers = lambda layers: setattr(model, "asked", layers)
        return SimpleNamespace(
            model=model, max_num_reqs=SLOTS, req_states=states, execute_model=lambda scheduler_output: "done"
        )

    def test_a_prompt_and_a_step(self, made, target, drafter, texts):
        prompt, truth = texts[2]
        config, runner = self.config(graphs=False), self.runner()
        one = made(config, torch.device("cpu"))
        assert [x[2] for x in config.speculative_config.num_speculative_tokens_per_batch_size] == [LENGTH, 0]
        one.attach(runner)
        assert runner.model.asked == (1,)
        assert runner.use_aux_hidden_state_outputs
        one.chains.slots.memory.fill_(1.0)  # of an earlier request in this slot
        runner.req_states.add_request(req_id="a", all_token_ids=prompt)
        tokens, lengths = runner.req_states.all_token_ids.gpu, runner.req_states.total_len.gpu
        start, decided = 0, len(prompt)
        for step in range(3):
            assert (
                runner.execute_model(SimpleNamespace(num_spec_tokens_to_schedule=0 if step == 1 else LENGTH)) == "done"
            )
            decided += 1
            tokens[1, :decided] = torch.tensor(truth[:decided])
            lengths[1] = decided
            batch = self.batch(start, decided - 1 - start, step == 0)
            states = hidden(target, drafter, truth[: decided - 1])[start:]
            earlier, last = states.chunk(2, dim=-1)
            found = one.propose(batch, None, None, last, [earlier], torch.tensor([1, 1]), torch.tensor([0, 0]), None)
            wanted_guesses, memory = expected(target, drafter, truth[:decided])
            assert found.tolist() == [[0] * LENGTH if step == 1 else wanted_guesses]
            torch.testing.assert_close(one.chains.slots.memory[1], memory)
            start = decided - 1
        assert one.propose(batch, None, None, last, None, None, None, dummy_run=True).tolist() == [[0] * LENGTH]

    def test_settings(self, made):
        """Each reaches the drafter; without scheduling ahead, vLLM could not use what steps cost."""
        config = self.config(width=3, graphs=False)
        config.scheduler_config.async_scheduling = False
        plain = made(config, torch.device("cpu"))
        assert config.speculative_config.num_speculative_tokens_per_batch_size is None
        mixed = made(self.config(drafter="recurrent+ngram"), torch.device("cpu"))
        for one in (plain, mixed):
            one.attach(self.runner())
            one.recorded = []
            one.chains.record = lambda one=one: one.recorded.append(1)
            one.capture()
        assert [one.chains.slots.search.shape.width for one in (plain, mixed)] == [3, 1]
        assert [one.chains.slots.odds is not None for one in (plain, mixed)] == [False, True]
        assert [len(one.recorded) for one in (plain, mixed)] == [0, 1]

    def batch(self, start: int, count: int, prompt: bool):
        return SimpleNamespace(
            num_reqs=1,
            num_tokens=count,
            idx_mapping=torch.tensor([1, 0], dtype=torch.int32),  # padded
            idx_mapping_np=[1],
            query_start_loc=torch.tensor([0, count, count], dtype=torch.int32),
            query_start_loc_np=[0, count],
            num_computed_prefill_tokens_np=torch.tensor([start]),
            num_scheduled_tokens=torch.tensor([count]),
            is_prefilling_np=[prompt],
            num_draft_tokens_per_req=None,
        )

    def test_refusals(self, made):
        with pytest.raises(ConfigError, match="all guesses have one length"):
            made(self.config(least=0.3), torch.device("cpu"))
        split = self.config()
        split.parallel_config.world_size_across_dp = 2
        with pytest.raises(ConfigError, match="for a model on one GPU"):
            made(split, torch.device("cpu"))
