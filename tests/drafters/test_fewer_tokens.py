"""On a CPU a drafter guesses among its most frequent tokens only, whoever loads it, and forgets none of the others."""

from pathlib import Path

import pytest
import torch

from redrafter.drafters import checkpoint, load
from redrafter.interop.sglang import target as sglang
from redrafter.interop.vllm import target as vllm
from redrafter.targets import load_target
from tests.helpers.zoo import make_model, recurrent_drafter

LOADERS = {
    "own": load.load_drafter,
    "vllm": lambda folder, target: vllm.drafter_for(str(folder), target),
    "sglang": lambda folder, target: sglang.drafter_for(str(folder), target),
}


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


def saved(target, folder: Path, ids: torch.Tensor) -> Path:
    drafter = recurrent_drafter(target, head="tied", draft_vocab_size=len(ids))
    drafter.net.token_ids.copy_(ids)
    drafter.save(folder, target)
    return folder


@pytest.mark.parametrize("loader", LOADERS)
def test_a_cpu_guesses_fewer_and_a_checkpoint_keeps_all(target, tmp_path, monkeypatch, loader):
    monkeypatch.setattr(load, "CPU_TOKENS", 5)
    ids = torch.tensor([7, 3, 12, 4, 9, 1, 8, 2, 20])
    drafter = LOADERS[loader](saved(target, tmp_path / "one", ids), target)
    assert drafter.net.token_ids.tolist() == ids[:5].tolist()
    assert drafter.net.config.guessable == len(drafter.vocabulary) == 5
    drafter.save(tmp_path / "two", target)
    again, _ = checkpoint.read(tmp_path / "two")
    assert again.token_ids.tolist() == ids.tolist()
    assert again.config.guessable == len(ids)


def test_sorted_tokens_are_not_in_order_of_frequency(target, tmp_path, monkeypatch):
    """Older drafters have them: the first ones are those with the smallest ids."""
    monkeypatch.setattr(load, "CPU_TOKENS", 5)
    ids = torch.arange(2, 11)
    assert load.load_drafter(saved(target, tmp_path, ids), target).net.token_ids.tolist() == ids.tolist()
