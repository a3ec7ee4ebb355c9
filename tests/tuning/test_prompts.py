"""Texts to tune with: the target's own, with and without a chat template."""

import pytest

from redrafter import Engine
from redrafter.drafters import NoDrafter
from redrafter.errors import ConfigError
from redrafter.tuning.prompts import target_texts
from tests.helpers.letters import TEMPLATE, make_target


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_the_target_writes_the_texts(template):
    target = make_target(template)
    plain = Engine(target, NoDrafter())
    texts = target_texts(plain, None, count=3, length=8)
    assert 1 <= len(texts) <= 3
    for i in range(len(texts)):
        row, prompt = texts.row(i).tolist(), int(texts.prompts[i])
        [again] = [plain.generate(row[:prompt], max_new_tokens=8).tokens]
        assert again == row[prompt:]


def test_the_same_call_gives_the_same_texts():
    engine = Engine(make_target(None), NoDrafter())
    first, again = (target_texts(engine, None, count=3, length=8, temperature=1.0) for _ in range(2))
    assert first.tokens.tolist() == again.tokens.tolist()


def test_texts_without_room_for_two_tokens_are_refused():
    engine = Engine(make_target(), NoDrafter())
    with pytest.raises(ConfigError, match="less than two tokens after each prompt"):
        target_texts(engine, None, count=3, length=1)
