"""Beginnings of texts to tune with: prompts through the chat template, or what the target writes."""

import pytest

from redrafter import Engine
from redrafter.drafters import NoDrafter
from redrafter.tuning.prompts import OPENING_TOKENS, PROMPTS, openings_of
from tests.helpers.letters import TEMPLATE, make_target


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_texts_begin_with_prompts_or_with_what_the_target_writes(template: str | None) -> None:
    engine = Engine(make_target(template), NoDrafter())
    openings = openings_of(engine, None, 3)
    assert openings == openings_of(engine, None, 3), "the same ones each time"
    assert 1 <= len(openings) <= 3
    if template is None:
        assert all(1 <= len(ids) <= OPENING_TOKENS + 1 for ids in openings)
    else:
        asked = [PROMPTS[i * len(PROMPTS) // 3] for i in range(3)]
        assert openings == [engine.encode([{"role": "user", "content": text}]) for text in asked]


def test_prompts_of_the_user_come_first() -> None:
    engine = Engine(make_target(None), NoDrafter())
    assert openings_of(engine, ["ab", "c"], 5) == [engine.encode("ab"), engine.encode("c")]
