"""Local distillation: rollouts at every position, and the texts they are made on."""

import gzip

import pytest
import torch

from redrafter import Engine
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError
from redrafter.targets import Target, load_target
from redrafter.train import local_rollouts as local
from redrafter.train.config import DistillConfig
from redrafter.train.dataset import read_texts
from redrafter.train.distill import distill
from redrafter.train.local_rollouts import read_documents, roll_out
from tests.helpers.letters import FILE, SMALL, make_target
from tests.helpers.zoo import PROMPTS, VOCAB, make_model


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def naive(target: Target, prompt: list[int], depth: int) -> list[int]:
    return Engine(target, NoDrafter()).generate(prompt, max_new_tokens=depth, ignore_eos=True).tokens


@pytest.fixture
def padded() -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(p) for p in PROMPTS)
    return torch.tensor([p + [0] * (width - len(p)) for p in PROMPTS]), torch.tensor([len(p) for p in PROMPTS])


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "qwen2-mixed", "gpt2", "gpt-neox"])
def test_rollouts_are_greedy_continuations(kind, padded, monkeypatch):
    target = load_target(make_model(kind))
    got = roll_out(target, *padded, 5)
    for row, prompt in enumerate(PROMPTS):
        for t in range(len(prompt)):
            assert got[row, t].tolist() == naive(target, prompt[: t + 1], 5)
        assert (got[row, len(prompt) :] == -1).all()
    monkeypatch.setattr(local, "LOGIT_ELEMENTS", 5 * VOCAB * 4)
    assert torch.equal(roll_out(target, *padded, 5), got), "columns may come in portions"


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_rollouts_twin(kind, padded, monkeypatch):
    """A mask that lets rollouts see each other is found out."""
    target = load_target(make_model(kind))
    right = roll_out(target, *padded, 5)
    mask = local.rollout_visibility

    def leaky(place, ahead, width):
        slot = torch.arange((ahead + 1) * width)
        return mask(place, ahead, width) | ((slot >= width) & (slot % width <= place[:, None]))

    monkeypatch.setattr(local, "rollout_visibility", leaky)
    assert not torch.equal(roll_out(target, *padded, 5), right)


def test_rollouts_of_answers_and_of_given_texts(target, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "MASK_ELEMENTS", 2 * 30 * 30 * 3)
    config = DistillConfig(**vars(SMALL) | {"local": 3})
    distill(target, tmp_path / "answers", config, prompts=FILE)
    distill(target, tmp_path / "texts", config, documents=["abcdefghi", "jklm", "b" * 200])
    for folder, count in (("answers", 4), ("texts", 3)):
        made = read_texts(tmp_path / folder, target)
        assert len(made) == count
        assert made.rollouts is not None
        assert made.rollouts.shape == (len(made.tokens), 3)
        for i in range(count):
            row, own = made.row(i).tolist(), made.rollouts[made.starts[i] : made.starts[i + 1]]
            for t in range(0, min(len(row), 90), 7):
                assert own[t].tolist() == naive(target, row[: t + 1], 3)
    assert sorted(made.lengths.tolist()) == [4, 9, 79], "cut at longest_prompt + max_new_tokens"
    with pytest.raises(ConfigError, match="set local to 1"):
        distill(target, tmp_path / "x", SMALL, documents=["abc"])
    with pytest.raises(ConfigError, match="not both"):
        distill(target, tmp_path / "x", config, documents=["abc"], prompts=FILE)
    with pytest.raises(ConfigError, match="nothing to start from"):
        distill(target, tmp_path / "x", config)


def test_documents_of_every_form(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n" + "word " * 700)
    found = read_documents(tmp_path / "a.txt")
    assert found[0] == "one\n\ntwo"
    assert max(len(f) for f in found) <= local.CHARACTERS
    assert " ".join(found[1:]) == ("word " * 700).strip()
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "one"}\n\n{"text": "two"}\n')
    assert read_documents(tmp_path / "a.jsonl.gz") == ["one", "two"]
    for name, content, says in (("e.txt", " \n", "holds no texts"), ("b.jsonl", '{"prompt": ""}', "line 1")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=says):
            read_documents(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read the texts"):
        read_documents(tmp_path / "none.txt")
