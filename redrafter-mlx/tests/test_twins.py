"""Each part of the machine, broken on purpose, must break equality: else test_exactness.py proves nothing."""

import dataclasses

import mlx.core as mx
import pytest
from zoo import PROMPTS, OracleDrafter, make_model, recurrent_drafter

from redrafter_mlx import accept, cache, decode, selfcheck
from redrafter_mlx import target as target_module
from redrafter_mlx.api import Engine
from redrafter_mlx.cache import TreeCache
from redrafter_mlx.config import Shape
from redrafter_mlx.drafter import NoDrafter
from redrafter_mlx.errors import UnsupportedTarget
from redrafter_mlx.target import Target

SHAPE = Shape(width=3, length=4)


def breaks(monkeypatch, where, name, new, model=None, prompts=PROMPTS[:3], **options) -> bool:
    """Texts are equal before, and differ once `where.name` is replaced."""
    target = Target(model or make_model())
    options = {"max_new_tokens": 16, "batch_size": 3} | options
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(prompts, **options)]

    def exact():
        oracle = Engine(target, OracleDrafter(prompts, plain, 0.7), SHAPE)
        return [c.tokens for c in oracle.generate(prompts, **options)] == plain

    assert exact()
    monkeypatch.setattr(where, name, new)
    found = not exact()
    target.release()
    return found


def causal(true):
    """A mask that shows each node all nodes before it."""

    def mask(self, tree, window):
        n = tree.tokens.shape[1]
        return true(
            self, dataclasses.replace(tree, mask=mx.broadcast_to(mx.tri(n, dtype=mx.bool_), tree.mask.shape)), window
        )

    return mask


def test_siblings_visible(monkeypatch):
    assert breaks(monkeypatch, TreeCache, "_tree_mask", causal(TreeCache._tree_mask))


def test_other_rows_text_visible(monkeypatch):
    def whole(self, tree, window):
        batch, n = tree.tokens.shape
        return mx.concatenate([mx.ones((batch, n, self.start), dtype=mx.bool_), tree.mask], axis=-1)[:, None]

    assert breaks(monkeypatch, TreeCache, "_tree_mask", whole)


def test_positions_by_slot_not_depth(monkeypatch):
    def by_slot(self):
        n = 1 if self.tree is None else self.tree.tokens.shape[1]
        return self.start if self.tree is None else mx.array(self.lengths)[:, None] + mx.arange(n)

    assert breaks(monkeypatch, TreeCache, "offset", property(by_slot))


def test_window_counted_in_slots(monkeypatch):
    true = TreeCache._tree_mask

    def slots_only(self, tree, window):
        if window is None:
            return true(self, tree, None)
        seen = true(self, tree, None)
        slot = mx.arange(seen.shape[-1])
        return seen & (slot[self.start :][:, None] - slot < window)

    assert breaks(monkeypatch, TreeCache, "_tree_mask", slots_only, model=make_model("mistral-window"), batch_size=1)


def test_no_commit(monkeypatch):
    def lengths_only(self, paths):
        self.lengths = [n + len(p) for n, p in zip(self.lengths, paths, strict=True)]

    assert breaks(monkeypatch, TreeCache, "commit", lengths_only)


def test_commit_in_the_wrong_order(monkeypatch):
    """A key carries its position, so full attention gives the same in any order; a window counts slots of the text."""
    true, model = TreeCache.commit, make_model("mistral-window")

    def turned(self, paths):
        true(self, [path[:1] + path[:0:-1] for path in paths])

    assert breaks(monkeypatch, TreeCache, "commit", turned, model=model)


def test_commit_that_writes_while_it_reads(monkeypatch):
    def slot_by_slot(stored, source, destination):
        for i in range(source.shape[2] - 1, -1, -1):
            stored = true(stored, source[:, :, i : i + 1], destination[:, :, i : i + 1])
        return stored

    true = cache.moved
    target = Target(make_model())
    prompts, options = PROMPTS, {"max_new_tokens": 24, "temperature": 1.0, "seed": 1}
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(prompts, **options)]
    engine = Engine(target, recurrent_drafter(target), Shape(width=8, length=4))
    assert [c.tokens for c in engine.generate(prompts, **options)] == plain
    monkeypatch.setattr(cache, "moved", slot_by_slot)
    assert [c.tokens for c in engine.generate(prompts, **options)] != plain
    target.release()


def test_accept_everything(monkeypatch):
    assert breaks(monkeypatch, accept, "deepest", lambda tree, hit: tree.depths.argmax(-1).astype(mx.int32))


def test_noise_from_the_step_not_the_position(monkeypatch):
    true = decode.gumbel

    def by_step(seeds, positions, count):
        return true(seeds, positions - positions[:, :1], count)

    target = Target(make_model())
    options = {"max_new_tokens": 16, "temperature": 1.0, "seed": 3}

    def exact():
        plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS[:3], **options)]
        oracle = Engine(target, OracleDrafter(PROMPTS[:3], plain, 0.7), SHAPE)
        return [c.tokens for c in oracle.generate(PROMPTS[:3], **options)] == plain

    assert exact()
    monkeypatch.setattr(decode, "gumbel", by_step)
    assert not exact()
    target.release()


def test_self_check_sees_a_broken_mask(monkeypatch):
    target = Target(make_model())
    selfcheck.check(target)
    monkeypatch.setattr(TreeCache, "_tree_mask", causal(TreeCache._tree_mask))
    with pytest.raises(UnsupportedTarget, match="other logits than its path alone"):
        selfcheck.check(target)
    target.release()


def test_self_check_sees_wrong_positions(monkeypatch):
    """A rotary embedding that gets the first node's position for all nodes."""

    def first_only(call, x, offset=0):
        whole = isinstance(offset, mx.array) and offset.ndim == 2
        return call(x, offset=offset[:, 0] if whole else offset)

    monkeypatch.setattr(target_module, "rotate_nodes", first_only)
    target = Target(make_model())
    with pytest.raises(UnsupportedTarget, match="other logits than its path alone"):
        selfcheck.check(target)
    target.release()
