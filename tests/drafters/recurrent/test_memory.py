"""One memory, three ways to compute it: token by token, in one sum, and for all positions at once."""

import pytest
import torch

from redrafter.drafters.recurrent.memory import Memory

B, S, PAIR, STATE = 3, 9, 7, 5


@pytest.fixture
def memory() -> Memory:
    torch.manual_seed(1)
    return Memory(heads=2, size=4, pair_size=PAIR, state_size=STATE).double()


PAIRS = torch.randn(B, S, PAIR, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
STATES = torch.randn(B, S, STATE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def one_by_one(memory: Memory, count: list[int]) -> torch.Tensor:
    gamma = torch.sigmoid(memory.decay)
    key, value = memory.pairs(PAIRS)
    rows = []
    for b, n in enumerate(count):
        m = torch.zeros(2, 4, 4, dtype=torch.float64)
        for j in range(n):
            m = gamma[:, None, None] * m + key[b, j, :, :, None] * value[b, j, :, None, :]
        rows.append(m)
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("count", [[9, 9, 9], [4, 0, 7]])
def test_a_prompt_in_one_sum(
    memory: Memory, count: list[int], compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    at_once = memory.add(memory.empty(B), PAIRS, torch.tensor(count))
    assert torch.allclose(at_once, one_by_one(memory, count))


@torch.no_grad()
def test_accepted_tokens_follow_the_prompt(memory: Memory) -> None:
    m = memory.add(memory.empty(B), PAIRS[:, :4], torch.tensor([4, 2, 0]))
    later = torch.stack([PAIRS[b, n : n + 5] for b, n in enumerate([4, 2, 0])])
    m = memory.add(m, later, torch.tensor([5, 3, 0]))
    assert torch.allclose(m, one_by_one(memory, [9, 5, 0]))


def read_all(memory: Memory, own: torch.Tensor | None = None) -> torch.Tensor:
    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)

    query, key, value = (heads_first(x) for x in (memory.queries(STATES), *memory.pairs(PAIRS)))
    mine = None
    if own is not None:
        mine = (heads_first(memory.pairs(own)[0]), heads_first(memory.pairs(own)[1]))
    twice = torch.stack([query, query.flip(0)], 2)  # two depths at each position
    first = torch.zeros(B, dtype=torch.long)
    found = memory.read_all(twice, key, value, memory.weights(first, S, S, own is not None), mine)
    assert not torch.equal(found[:, :, 0], found[:, :, 1])
    return found[:, :, 0]


@torch.no_grad()
def test_all_positions_at_once_read_what_each_would_alone(memory: Memory) -> None:
    parallel = read_all(memory)
    for t in range(S):
        alone = memory.read(one_by_one(memory, [t + 1] * B), STATES[:, t : t + 1])
        assert torch.allclose(parallel[:, t : t + 1], alone)


@torch.no_grad()
def test_positions_after_a_prompt_read_the_prompt(memory: Memory) -> None:
    """Each text has positions of its own: `first` says where they begin."""
    first = torch.tensor([5, 0, 3])
    states = torch.stack([STATES[b, n : n + 2] for b, n in enumerate(first.tolist())])
    query, key, value = (x.transpose(1, 2) for x in (memory.queries(states), *memory.pairs(PAIRS)))
    found = memory.read_all(query[:, :, None], key, value, memory.weights(first, 2, S, own=False))[:, :, 0]
    for k in range(2):
        alone = memory.read(one_by_one(memory, (first + k + 1).tolist()), states[:, k : k + 1])
        assert torch.allclose(found[:, k : k + 1], alone)
    wrong = memory.read_all(query[:, :, None], key, value, memory.weights(first * 0, 2, S, own=False))[:, :, 0]
    assert not torch.allclose(found, wrong)


@torch.no_grad()
def test_a_position_may_have_a_pair_of_its_own(memory: Memory) -> None:
    """Rollouts stand on another last token than the text's: only their own read sees it."""
    parallel = read_all(memory, PAIRS.flip(0))
    t = 4
    m = memory.add(one_by_one(memory, [t] * B), PAIRS.flip(0)[:, t : t + 1], torch.ones(B, dtype=torch.long))
    assert torch.allclose(parallel[:, t : t + 1], memory.read(m, STATES[:, t : t + 1]))
    assert not torch.allclose(parallel, read_all(memory))
    assert torch.allclose(read_all(memory, PAIRS), read_all(memory))
