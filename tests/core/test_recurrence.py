"""The recurrent memory with a step function of a few numbers: each node has the state of its own path alone."""

from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from redrafter.core.recurrence import RecurrentMemory, Runner, States, TextPass, TreePass
from redrafter.core.tree import Tree, pack_beam
from redrafter.targets.tree_levels import tree_levels

LENGTHS = torch.tensor([4, 0, 2])
TEXTS = torch.tensor([[3, 1, 4, 1], [0, 0, 0, 0], [9, 2, 0, 0]])


class Toy:
    """A state is a sum that decays and the last two inputs; the output depends on both."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.outputs = tokens.double(), torch.full(tokens.shape, torch.nan, dtype=torch.float64)

    def __call__(self, rows: Tensor, columns: Tensor, states: States | None) -> States:
        total = torch.zeros(len(rows), dtype=torch.float64) if states is None else states["sum"]
        last = torch.zeros(len(rows), 2, dtype=torch.float64) if states is None else states["last"]
        for column in columns.T:
            token = self.tokens[rows, column]
            total = total * 0.5 + token * last[:, 0]
            last = torch.stack([token, last[:, 0]], 1)
            self.outputs[rows, column] = total + 10 * last[:, 1]
        return {"sum": total, "last": last}


def alone(text: list[int], path: list[int]) -> Tensor:
    """The outputs of a path behind a text, one token at a time."""
    toy = Toy(torch.tensor([[*text, *path]]))
    states = None
    for column in range(len(text) + len(path)):
        states = toy(torch.tensor([0]), torch.tensor([[column]]), states)
    return toy.outputs[0, len(text) :]


def trees() -> Tree:
    """Three trees with siblings; one has an empty node, one is its root alone."""
    beam = torch.tensor([[[5, 6, 7], [5, 6, 8], [2, 6, 7]]] * 3)
    tree, _ = pack_beam(beam, torch.tensor([1, 2, 3]))
    empty = tree.valid.clone()
    empty[1, -1] = False
    empty[2, 1:] = False
    return replace(tree, valid=empty)


def read(memory: RecurrentMemory, together: bool = True) -> None:
    """The texts in two pieces."""
    for begin, stop in ((0, 1), (1, 4)):
        counts = [min(max(n - begin, 0), stop - begin) for n in LENGTHS.tolist()]
        text = TextPass(counts, begin)
        memory.run_text("layer", text, torch.device("cpu"), Toy(TEXTS[:, begin:stop]), together)


def verified(memory: RecurrentMemory, tree: Tree, lengths: Tensor) -> Tensor:
    toy = Toy(tree.tokens)
    memory.run_tree("layer", tree_levels(tree, lengths), len(lengths), toy)
    return toy.outputs


def expected(texts: list[list[int]], tree: Tree) -> Tensor:
    outputs = torch.full(tree.tokens.shape, torch.nan, dtype=torch.float64)
    for row, text in enumerate(texts):
        for node in tree.valid[row].nonzero()[:, 0].tolist():
            path = tree.mask[row, node].nonzero()[:, 0]
            outputs[row, node] = alone(text, tree.tokens[row, path].tolist())[-1]
    return outputs


def starts() -> list[list[int]]:
    return [row[:n] for row, n in zip(TEXTS.tolist(), LENGTHS.tolist(), strict=True)]


@pytest.mark.parametrize("together", [True, False])
def test_a_node_has_the_state_of_its_path_before_and_after_a_commit(together: bool) -> None:
    assert exact_over_two_steps(together)


def exact_over_two_steps(together: bool = True) -> bool:
    memory, tree = RecurrentMemory(), trees()
    read(memory, together)
    if not torch.equal(verified(memory, tree, LENGTHS).nan_to_num(), expected(starts(), tree).nan_to_num()):
        return False
    deep = [int(tree.valid[row].nonzero()[-1]) for row in range(3)]
    path = torch.zeros(3, 4, dtype=torch.long)
    for row, node in enumerate(deep):
        nodes = tree.mask[row, node].nonzero()[:, 0]
        path[row, : len(nodes)] = nodes
    count = torch.tensor([3, 2, 0])  # a row that is done accepts nothing
    memory.commit(path, count)
    taken = [tree.tokens[row, path[row, :n]].tolist() for row, n in enumerate(count.tolist())]
    texts = [[*a, *b] for a, b in zip(starts(), taken, strict=True)]
    again = verified(memory, tree, LENGTHS + count)
    return torch.equal(again.nan_to_num(), expected(texts, tree).nan_to_num())


def test_the_siblings_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecurrentMemory.run_tree

    def shifted(self: RecurrentMemory, layer: Hashable, trees: TreePass, rows: int, runner: Runner) -> None:
        """Each node goes on from the node before it, which is a sibling or a sibling's child."""
        levels = [x if x.parents is None else replace(x, parents=x.columns - 1) for x in trees.levels]
        run(self, layer, replace(trees, levels=levels), rows, runner)

    monkeypatch.setattr(RecurrentMemory, "run_tree", shifted)
    assert not exact_over_two_steps()


def test_a_commit_one_token_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = RecurrentMemory.commit
    monkeypatch.setattr(RecurrentMemory, "commit", lambda self, path, count: commit(self, path, count - 1))
    assert not exact_over_two_steps()


def test_rows_are_moved_kept_and_copied() -> None:
    memory, tree = RecurrentMemory(), trees()
    read(memory)
    wanted = verified(memory, tree, LENGTHS)
    copy = memory.snapshot(2)
    memory.part(2, 3).layers["layer"]["sum"].fill_(99)  # the same memory
    assert memory.layers["layer"]["sum"][2] == 99
    memory.place(copy, torch.tensor([2]))
    assert torch.equal(verified(memory, tree, LENGTHS).nan_to_num(), wanted.nan_to_num())
    memory.keep(torch.tensor([2, 0]))
    kept = replace(tree, **{k: getattr(tree, k)[[2, 0]] for k in ("tokens", "parents", "depths", "valid", "mask")})
    assert torch.equal(verified(memory, kept, LENGTHS[[2, 0]]).nan_to_num(), wanted[[2, 0]].nan_to_num())
    assert copy.nbytes == 3 * 8
