import torch

from redrafter.core.cache import KVCache, slot_positions, tree_visibility
from redrafter.core.tree import pack_beam


def filled(batch=3, heads=2, slots=14, size=4) -> KVCache:
    cache = KVCache(slots=slots)
    everything = torch.arange(slots).expand(batch, -1)
    values = torch.randn(batch, heads, slots, size)
    cache.write(0, values, values + 100, everything)
    return cache


def test_write_goes_to_each_rows_own_slots():
    cache = KVCache(slots=6)
    new = torch.ones(2, 1, 2, 3)
    keys, values = cache.write(5, new, 2 * new, torch.tensor([[0, 1], [3, 5]]))
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 1]]
    assert torch.equal(values, 2 * keys)


def test_commit_moves_the_path_in_place_and_touches_nothing_else():
    cache = filled()
    lengths = torch.tensor([5, 0, 3])
    path = torch.tensor([[0, 2, 5], [0, 1, 2], [0, 3, 1]])  # overlapping sources and destinations
    before = [t.clone() for t in cache.tensors()]
    storage = [t.data_ptr() for t in cache.tensors()]
    cache.commit(lengths, path, torch.tensor([3, 1, 2]))
    assert [t.data_ptr() for t in cache.tensors()] == storage, "no clone"
    for old, new in zip(before, cache.tensors(), strict=True):
        for row, start in enumerate(lengths.tolist()):
            expected = old[row].clone()
            for i, node in enumerate(path[row].tolist()):
                expected[:, start + i] = old[row][:, start + node]
            assert torch.equal(new[row], expected)


def test_reserve_keeps_what_is_there():
    cache = filled(slots=5)
    before = [t.clone() for t in cache.tensors()]
    cache.reserve(9)
    cache.reserve(7)
    for old, new in zip(before, cache.tensors(), strict=True):
        assert new.shape[2] == cache.slots == 9
        assert torch.equal(new[:, :, :5], old)


def test_keep_rows():
    cache = filled()
    before = [t.clone() for t in cache.tensors()]
    cache.keep(torch.tensor([2, 0]))
    for old, new in zip(before, cache.tensors(), strict=True):
        assert torch.equal(new, old[[2, 0]])


def test_visibility_and_positions_of_a_tree():
    tree, _ = pack_beam(torch.tensor([[[1, 2], [1, 3]]] * 2), torch.tensor([0, 0]))
    lengths = torch.tensor([4, 1])
    visible = tree_visibility(lengths, tree.mask, 10)
    where = slot_positions(lengths, tree.depths, 10)
    for row, length in enumerate(lengths.tolist()):
        for node in range(tree.nodes + 1):
            expected = set(range(length)) | {length + j for j in tree.mask[row, node].nonzero()[:, 0].tolist()}
            assert set(visible[row, node].nonzero()[:, 0].tolist()) == expected
        assert where[row, : length + tree.nodes + 1].tolist() == [
            *range(length),
            *(length + int(d) for d in tree.depths[row]),
        ]
