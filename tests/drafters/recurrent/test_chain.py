"""The recurrent drafter under an external scheduler: in any order of passes, it guesses as from the whole text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redrafter import Engine, Shape
from redrafter.core.beam import beam_search, candidates
from redrafter.drafters.recurrent.chain import ChainDrafter, RequestPass, picked
from redrafter.drafters.recurrent.chain_search import ChainSearch
from redrafter.drafters.recurrent.drafter import RecurrentState
from redrafter.errors import ConfigError
from redrafter.interop.vllm.recorded_chains import RecordedChains
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, recurrent_drafter

LENGTH = 3


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


@pytest.fixture(scope="module")
def drafter(target):
    parts = {"layers": (1, -1), "context_size": 64, "first_state": "context", "memory_heads": 2, "memory_size": 8}
    return recurrent_drafter(target, **parts)


def chains(drafter, width: int = 1, min_probability: float = 0.0) -> ChainDrafter:
    return ChainDrafter(drafter, Shape(width=width, length=LENGTH), min_probability)


@dataclass(frozen=True)
class Computed:
    """A request's part of a pass, and its hidden states."""

    done: RequestPass
    states: torch.Tensor

    @property
    def request(self) -> str:
        return self.done.request


def computed(name: str, owner: object, tokens: list[int], start: int, states: torch.Tensor, guess=True) -> Computed:
    return Computed(RequestPass(name, owner, np.array(tokens, dtype=np.int32), start, len(states), guess), states)


def step(chain_drafter: ChainDrafter, parts: Sequence[Computed], draft: bool = True) -> list[list[int]]:
    return chain_drafter.step([c.done for c in parts], torch.cat([c.states for c in parts]), draft)


def memory_of(chain_drafter: ChainDrafter, request: str) -> torch.Tensor:
    return chain_drafter.slots.memory[chain_drafter.requests[request].slot]


def hidden(target, drafter, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return target.states(torch.tensor([tokens]), drafter.layers)[0]


@torch.no_grad()
def expected(target, drafter, tokens: list[int], width: int = 1) -> tuple[list[int], torch.Tensor]:
    """The chain after this text, and the memory, from the whole text at once."""
    whole = torch.tensor([tokens])
    states = hidden(target, drafter, tokens[:-1])[None]
    count = torch.tensor([len(tokens) - 1])
    memory = drafter.remember(drafter.net.memory.empty(1), whole[:, 1:], states, count)
    context = RecurrentState(drafter.net.context(states[:, -1]), memory)
    tree = drafter.draft(context, whole[:, -1], chains(drafter, width).slots.search)
    return tree.tokens[0, 1:].tolist(), memory[0]


class Scheduler:
    """Texts that are known, computed in whatever pieces somebody likes."""

    def __init__(self, target, drafter, texts: dict[str, list[int]], prompts: dict[str, int], seed: int) -> None:
        self.target, self.drafter, self.texts = target, drafter, texts
        self.decided = dict(prompts)
        self.computed = dict.fromkeys(texts, 0)
        self.owners = {name: object() for name in texts}
        self.random = random.Random(seed)

    def preempt(self, name: str, kept: int = 0) -> None:
        """Its keys are dropped, but for `kept` that a prefix cache still holds."""
        self.computed[name] = kept

    def computes(self, name: str, most: int) -> Computed:
        """The next piece of a request: some of what is decided, or guesses after it, some of them refused."""
        start, decided, text = self.computed[name], self.decided[name], self.texts[name]
        if start + most < decided:
            given, gained = text[start : start + most], 0
            self.computed[name] += most
        else:
            right = self.random.randint(0, min(LENGTH, len(text) - decided - 1))
            junk = [(t + 1) % VOCAB for t in text[decided + right : decided + LENGTH]]
            given, gained = text[start : decided + right] + junk, right + 1
            self.computed[name] = decided + right
            self.decided[name] += gained
        states = hidden(self.target, self.drafter, text[:start] + given)[start:]
        return computed(name, self.owners[name], text[: self.decided[name]], start, states, guess=gained > 0)


def scheduler(target, drafter, seed: int = 0) -> Scheduler:
    plain = Engine(target, drafter).plain()
    written = plain.generate(PROMPTS, max_new_tokens=30)
    texts = {f"r{i}": [*p, *c.tokens] for i, (p, c) in enumerate(zip(PROMPTS, written, strict=True))}
    return Scheduler(target, drafter, texts, {f"r{i}": len(p) for i, p in enumerate(PROMPTS)}, seed)


def busy(made: Scheduler, chain_drafter: ChainDrafter, passes: int = 25, spoil=lambda done: done):
    """Random passes: requests in any order, some left out, pieces of any size, some preempted; yields each chain."""
    for _ in range(passes):
        names = [n for n in made.texts if made.decided[n] + LENGTH + 1 < len(made.texts[n])]
        names = made.random.sample(names, made.random.randint(min(1, len(names)), len(names)))
        if names and made.random.random() < 0.3:
            made.preempt(made.random.choice(names))
        if not names:
            continue
        done = [made.computes(n, made.random.randint(1, 9)) for n in names]
        for c, chain in zip(done, step(chain_drafter, spoil(done)), strict=True):
            assert bool(chain) == c.done.guess
            if c.done.guess:
                yield c, chain


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_gives_the_guesses_of_the_whole_text(target, drafter, seed):
    chain_drafter, seen = chains(drafter), 0
    for c, chain in busy(scheduler(target, drafter, seed), chain_drafter):
        guesses, memory = expected(target, drafter, c.done.tokens.tolist())
        assert chain == guesses
        torch.testing.assert_close(memory_of(chain_drafter, c.request), memory)
        seen += 1
    assert seen > 20


@pytest.mark.parametrize("fault", ["twice", "late", "moved"])
def test_any_schedule_twin(target, drafter, fault, monkeypatch):
    """Pairs taken twice, states of the position after, states of the neighbour: each is noticed."""
    chain_drafter = chains(drafter)
    if fault == "twice":
        monkeypatch.setattr(ChainDrafter, "_state", forgetful)
    wrong = 0
    for c, _ in busy(scheduler(target, drafter), chain_drafter, passes=12, spoil=SPOILT.get(fault, lambda done: done)):
        _, memory = expected(target, drafter, c.done.tokens.tolist())
        wrong += not torch.allclose(memory_of(chain_drafter, c.request), memory)
    assert wrong


_state = ChainDrafter._state


def forgetful(self, *given):
    found = _state(self, *given)
    found.remembered = 0
    return found


SPOILT = {
    "late": lambda done: [replace(c, states=c.states.roll(-1, dims=0)) for c in done],
    "moved": lambda done: [
        replace(c, states=d.states) if len(d.states) == len(c.states) else c
        for c, d in zip(done, done[1:] + done[:1], strict=True)
    ],
}


def driven(target, chain_drafter: ChainDrafter, name: str, prompt: list[int], truth: list[int]) -> int:
    """The steps of a known text, driven as another engine would."""
    decided, start, steps, owner = len(prompt), 0, -1, object()
    guesses: list[int] = []
    while decided < len(truth):
        states = hidden(target, chain_drafter.slots.drafter, truth[:decided] + guesses)[start:]
        right = next((k for k, g in enumerate(guesses) if truth[decided + k : decided + k + 1] != [g]), len(guesses))
        start, old = decided + right, start
        decided = min(decided + right + 1, len(truth))
        [guesses] = step(chain_drafter, [computed(name, owner, truth[:decided], old, states)])
        steps += 1
    return steps


def test_steps_are_those_of_our_own_engine(target, drafter):
    engine = Engine(target, drafter, shape=Shape(width=1, length=LENGTH))
    for i, prompt in enumerate(PROMPTS):
        [done] = engine.generate([prompt], max_new_tokens=24)
        assert driven(target, chains(drafter), str(i), prompt, prompt + done.tokens) == done.stats.steps


def test_ngrams_are_mixed_in(target, drafter):
    """A text that repeats takes fewer steps; a text that does not repeat takes as many as without n-grams."""
    both = chains(drafter), ChainDrafter(drafter, Shape(width=1, length=LENGTH), ngrams=True)
    start = [3, 8, 5, 9, 2, 7]
    alone, joint = (driven(target, c, "loop", start * 2, start * 8) for c in both)
    assert joint < alone
    assert joint <= 2 + 36 / (LENGTH + 1)
    assert both[1].slots.hits[both[1].requests["loop"].slot, 0] > 4
    fresh = list(range(20, 40))
    alone, joint = (driven(target, c, "fresh", fresh[:4], fresh) for c in both)
    assert joint == alone


@pytest.mark.parametrize("ngrams", [False, True])
def test_a_recorded_step_is_the_same_step(target, drafter, ngrams):
    """Recordings of fixed sizes, for batches that they fit and for larger ones: guesses and memories are equal."""
    eager, recorded = (ChainDrafter(drafter, Shape(width=1, length=LENGTH), ngrams=ngrams) for _ in range(2))
    replayed: list[int] = []

    def record(actions):
        def counted(action):
            return SimpleNamespace(replay=lambda: (replayed.append(1), action()))

        return [counted(action) for action in actions]

    recorded.follow = RecordedChains(recorded, [1, 4], record)  # 2 and 3 requests are padded
    made, seen = scheduler(target, drafter, 1), 0
    made.texts = {name: text[:12] * 3 for name, text in made.texts.items()}  # n-grams have something to copy
    wanted: dict[str, list[int]] = {}

    def both(done):
        wanted.update((c.request, chain) for c, chain in zip(done, step(eager, done), strict=True))
        return done

    for c, chain in busy(made, recorded, spoil=both):
        assert chain == wanted[c.request]
        torch.testing.assert_close(memory_of(recorded, c.request), memory_of(eager, c.request))
        seen += 1
    assert seen > 20
    assert replayed


def test_a_gpu_that_cannot_record_drafts_eagerly(target, drafter, caplog):
    def record(actions):
        raise RuntimeError("no graphs here")

    chain_drafter = chains(drafter)
    chain_drafter.follow = RecordedChains(chain_drafter, [1, 2], record)
    assert "drafting is not recorded and runs eagerly: no graphs here" in caplog.text
    text = scheduler(target, drafter).texts["r2"][:15]
    states = hidden(target, drafter, text[:-1])
    [chain] = step(chain_drafter, [computed("a", None, text, 0, states)])
    assert chain == expected(target, drafter, text)[0]


def test_a_cached_prefix_leaves_a_gap_and_nothing_else(target, drafter):
    """What was never computed here is not in the memory; the context is there all the same."""
    chain_drafter = chains(drafter)
    text = scheduler(target, drafter).texts["r2"]
    n, cached = 20, 8
    states = hidden(target, drafter, text[: n - 1])
    [chain] = step(chain_drafter, [computed("a", None, text[:n], cached, states[cached:])])
    assert len(chain) == LENGTH
    count = torch.tensor([n - 1 - cached])
    pairs = torch.tensor([text[cached + 1 : n]])
    memory = drafter.remember(drafter.net.memory.empty(1), pairs, states[None, cached:], count)[0]
    torch.testing.assert_close(memory_of(chain_drafter, "a"), memory)
    assert not torch.allclose(memory, expected(target, drafter, text[:n])[1])


def test_the_same_name_again_is_another_request(target, drafter):
    chain_drafter = chains(drafter)
    texts = scheduler(target, drafter).texts
    for owner, name in ((object(), "r0"), (object(), "r2")):
        text = texts[name][:15]
        states = hidden(target, drafter, text[:-1])
        [chain] = step(chain_drafter, [computed("same", owner, text, 0, states)])
        assert chain == expected(target, drafter, text)[0]
    chain_drafter.keep(["others"])
    assert not chain_drafter.requests


def test_a_request_that_waits_makes_room(target, drafter):
    """More requests than slots: one that is not in the pass is forgotten, and begins anew when it comes back."""
    chain_drafter = ChainDrafter(drafter, Shape(width=1, length=LENGTH), slots=2)
    texts = scheduler(target, drafter).texts
    names = ["r0", "r1", "r2"]
    whole = {n: computed(n, n, texts[n][:15], 0, hidden(target, drafter, texts[n][:14])) for n in names}
    for group in (names[:2], names[1:], names[:1]):
        found = step(chain_drafter, [whole[n] for n in group])
        assert found == [expected(target, drafter, texts[n][:15])[0] for n in group]
        assert len(chain_drafter.requests) <= 2
    with pytest.raises(ConfigError, match="3 requests at once are more than the drafter's 2 slots"):
        step(chain_drafter, [whole[n] for n in names])


def test_memories_follow_the_text_while_nothing_is_drafted(target, drafter):
    chain_drafter = chains(drafter)
    text = scheduler(target, drafter).texts["r2"]
    states = hidden(target, drafter, text)
    assert step(chain_drafter, [computed("a", None, text[:11], 0, states[:10])], draft=False) == [[]]
    for n in range(11, 15):
        assert step(chain_drafter, [computed("a", None, text[: n + 1], n - 1, states[n - 1 : n])], draft=False) == [[]]
    [chain] = step(chain_drafter, [computed("a", None, text[:16], 14, states[14:15])])
    guesses, memory = expected(target, drafter, text[:16])
    assert chain == guesses
    torch.testing.assert_close(memory_of(chain_drafter, "a"), memory)


class Launches(TorchDispatchMode):
    """Counts operations that compute or copy something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.count += not func.is_view
        return found


@pytest.mark.parametrize("ngrams", [False, True])
def test_a_step_launches_as_much_for_many_requests_as_for_one(target, drafter, ngrams):
    text = [t % VOCAB for t in range(3, 33)]
    states = hidden(target, drafter, text)
    launched = []
    for rows in (2, 8):
        chain_drafter = ChainDrafter(drafter, Shape(width=1, length=LENGTH), ngrams=ngrams)
        outside = Launches()
        chain_drafter.follow = lambda rows, hidden, draft: torch.zeros(rows, LENGTH, dtype=torch.long)
        step(chain_drafter, [computed(str(i), None, text[:20], 0, states[:19]) for i in range(rows)])
        passes = [computed(str(i), None, text[:22], 19, states[19:23]) for i in range(rows)]
        given = [c.done for c in passes], torch.cat([c.states for c in passes])
        with outside:
            chain_drafter.step(*given)
            chain_drafter.follow_eagerly(rows, given[1], draft=True)
        launched.append(outside.count)
    assert launched[0] == launched[1]


def test_tokens_that_are_taken_back_begin_it_anew(target, drafter):
    """An engine may drop tokens that it failed to load; what was remembered of them goes too."""
    chain_drafter = chains(drafter)
    text, owner = scheduler(target, drafter).texts["r2"], object()
    for n in (20, 12):
        states = hidden(target, drafter, text[: n - 1])
        [chain] = step(chain_drafter, [computed("a", owner, text[:n], 0, states)])
        assert chain == expected(target, drafter, text[:n])[0]


def test_the_best_path_of_a_beam(target, drafter):
    text = scheduler(target, drafter).texts["r2"][:20]
    states = hidden(target, drafter, text[:-1])
    [wide] = step(chains(drafter, width=4), [computed("a", None, text, 0, states)])
    table = torch.randn(VOCAB, VOCAB, dtype=torch.float64)

    def advance(state, tokens, parents):
        return table[tokens], state

    last = torch.tensor([3, 8])
    zero = torch.zeros(1, dtype=torch.float64)
    beam = beam_search(
        advance, None, last, width=4, length=LENGTH, temperature=zero.expand(2), noise=zero.expand(2, LENGTH + 1, VOCAB)
    )
    tree = ChainSearch(Shape(width=4, length=LENGTH), 0.0, VOCAB, torch.float64).tree(advance, None, last)
    assert tree.tokens[:, 1:].tolist() == candidates(beam)[:, 0].tolist()
    assert tree.parents[0].tolist() == [0, 0, 1, 2]
    assert len(wide) == LENGTH


def test_guesses_end_where_the_drafter_is_unsure(target, drafter):
    table = torch.zeros(VOCAB, VOCAB)
    table[3, 8], table[8, 5] = 9.0, 9.0  # sure of two tokens; of the third it knows nothing

    def advance(state, tokens, parents):
        return table[tokens], state

    tree = ChainSearch(Shape(width=1, length=LENGTH), 0.5, VOCAB, torch.float32).tree(
        advance, None, torch.tensor([3, 7])
    )
    assert tree.valid.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert tree.tokens[0, 1:3].tolist() == [8, 5]
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\)"):
        chains(drafter, min_probability=1.0)


def test_a_request_gets_no_hidden_states_of_another():
    """The memory multiplies unused states by 0, and 0 times NaN is NaN."""
    hidden = torch.tensor([[1.0], [2.0], [torch.nan], [3.0]])
    found = picked(hidden, torch.tensor([0, 3, 3]), torch.tensor([2, 1, 0]), 3)
    assert found[:, :, 0].tolist() == [[1, 2, 2], [3, 3, 3], [3, 3, 3]]
