"""Each part of the machine, broken on purpose, must break equality: else the tests above prove nothing."""

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.core import accept, step
from redrafter.core.rules import beam_search
from redrafter.drafters import NoDrafter
from redrafter.errors import UnsupportedTarget
from redrafter.runtime import eager, host_step
from redrafter.runtime.cache import Arena
from redrafter.targets import load_target
from redrafter.targets import target as target_module
from redrafter.targets.selfcheck import check
from tests.helpers.zoo import PROMPTS, OracleDrafter, make_model, recurrent_drafter

SHAPE = Shape(width=3, length=4)


def still_exact(**options) -> bool:
    target = load_target(make_model())
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=24, **options)]
    return exact_against(target, plain, **options)


def exact_against(target, plain, **options) -> bool:
    oracle = Engine(target, OracleDrafter(PROMPTS, plain, 0.7), shape=SHAPE)
    return [c.tokens for c in oracle.generate(PROMPTS, max_new_tokens=24, **options)] == plain


def broken(monkeypatch, where, name, new, model=None, **options) -> bool:
    """Texts differ once `where.name` is replaced."""
    target = load_target(model or make_model())
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=24, **options)]
    assert exact_against(target, plain, **options)
    monkeypatch.setattr(where, name, new)
    return not exact_against(target, plain, **options)


def test_siblings_visible(monkeypatch):
    true = target_module.tree_visibility

    def all_earlier(lengths, mask, slots):
        return true(lengths, torch.ones_like(mask).tril(), slots)

    assert broken(monkeypatch, target_module, "tree_visibility", all_earlier)


def test_positions_by_slot_not_depth(monkeypatch):
    verify = target_module.Target.verify

    def by_slot(self, tree, lengths, cache, layers):
        import dataclasses

        slots = torch.arange(tree.tokens.shape[1]).expand_as(tree.tokens)
        return verify(self, dataclasses.replace(tree, depths=slots), lengths, cache, layers)

    assert broken(monkeypatch, target_module.Target, "verify", by_slot)


def test_window_counted_in_slots(monkeypatch):
    def slots_only(lengths, depths, slots):
        return torch.arange(slots).expand(lengths.shape[0], -1)

    assert broken(
        monkeypatch, target_module, "slot_positions", slots_only, model=make_model("mistral", sliding_window=2)
    )


def test_no_commit(monkeypatch):
    assert broken(monkeypatch, Arena, "commit", lambda self, lengths, path, count: None)


def test_commit_that_writes_while_it_reads(monkeypatch):
    def slot_by_slot(self, lengths, path, count):
        for whole in self.tensors():
            for row, start in enumerate(lengths.tolist()):
                for i in reversed(range(path.shape[1])):
                    whole[row, :, start + i] = whole[row, :, start + int(path[row, i])]

    target = load_target(make_model())
    plain = [
        c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=24, temperature=1.0, seed=1)
    ]
    drafter = recurrent_drafter(target)
    engine = Engine(target, drafter, shape=Shape(width=8, length=4))
    run = lambda: [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=24, temperature=1.0, seed=1)]  # noqa: E731
    assert run() == plain
    monkeypatch.setattr(Arena, "commit", slot_by_slot)
    assert run() != plain


def test_accept_everything(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(eager, "runs_on_host", lambda *_: False)
        assert broken(patch, accept, "deepest", lambda tree, hit: tree.depths.argmax(-1))

    def straight(choice, tokens, parents, valid):
        path = list(range(min(sum(valid), 3)))
        return path, [choice[node] for node in path]

    assert broken(monkeypatch, host_step, "walked", straight)


def test_noise_from_the_step_not_the_position(monkeypatch):
    true = beam_search.gumbel

    def by_step(seeds, positions, vocab_size, **kw):
        return true(seeds, positions - positions[:, :1], vocab_size, **kw)

    assert still_exact(temperature=1.0, seed=3)
    monkeypatch.setattr(beam_search, "gumbel", by_step)
    assert not still_exact(temperature=1.0, seed=3)


def test_eos_not_cut(monkeypatch):
    target = load_target(make_model())
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=24)]
    target.model.generation_config.eos_token_id = plain[0][6]
    try:
        ended = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=24)]
        assert exact_against(target, ended)
        with monkeypatch.context() as patch:
            patch.setattr(eager, "runs_on_host", lambda *_: False)
            assert exact_against(target, ended)
            patch.setattr(step, "cut", lambda accepted, rows: (accepted, rows.done | (rows.remaining <= 8)))
            assert not exact_against(target, ended)
        true = host_step.cut
        monkeypatch.setattr(host_step, "cut", lambda found, remaining, done, eos: true(found, remaining, done, []))
        assert not exact_against(target, ended)
    finally:
        target.model.generation_config.eos_token_id = None


def test_self_check_sees_a_broken_mask(monkeypatch):
    target = load_target(make_model())
    true = target_module.tree_visibility
    monkeypatch.setattr(
        target_module, "tree_visibility", lambda n, mask, slots: true(n, torch.ones_like(mask).tril(), slots)
    )
    with pytest.raises(UnsupportedTarget, match="other logits than its path alone"):
        check(target)
