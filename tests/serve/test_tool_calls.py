"""Calls found in texts of each family, whole and piece by piece."""

import json
import random

import pytest

from redrafter.serve.tool_calls import FORMS, CallParser, FormName

ARGUMENTS = '{"city": "Oslo {\\"}", "days": [1, {"a": 2}]}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
TEXTS: list[tuple[FormName, str, str, int]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    ("hermes", f"Let me see.<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.\n", 2),
    ("hermes", "There is no <tool here.", "There is no <tool here.", 0),
    ("hermes", f"<tool_call>{CALL}</tool_call> Done.", " Done.", 1),
    ("hermes", "<tool_call>no call</tool_call>", "no call</tool_call>", 0),
    ("hermes", "<tool_call>{not json", "{not json", 0),
    ("llama3", LLAMA, "", 1),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", "", 2),
    ("llama3", f'  {{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}', "", 1),
    ("llama3", '{"answer": 4} is the answer', '{"answer": 4} is the answer', 0),
    ("llama3", "Hello {", "Hello {", 0),
    ("llama3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', 0),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", 2),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", 2),
    ("mistral", "[TOOL CALLS] are nice [1]", "[TOOL CALLS] are nice [1]", 0),
    ("json", CALL, "", 1),
    ("json", f'{{"arguments": {ARGUMENTS}, "name": "weather", "id": 7}}', "", 1),
    ("json", "", "", 0),
]


def parsed(form: FormName, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(FORMS[form], {"weather"}, most)
    content, calls = "", {}
    for i, piece in enumerate(pieces):
        found = parser.take(piece, final=i == len(pieces) - 1)
        content += found.content
        for call in found.calls:
            if call.index not in calls:
                assert call.name
                assert call.id
                calls[call.index] = (call.name, "")
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.arguments)
    assert sorted(calls) == list(range(len(calls)))
    return content, [calls[i] for i in range(len(calls))]


@pytest.mark.parametrize(("form", "text", "content", "count"), TEXTS, ids=lambda x: str(x)[:40])
def test_calls_are_found_however_the_text_comes(form: FormName, text: str, content: str, count: int) -> None:
    whole = parsed(form, [text])
    assert whole[0] == content
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == [
        ("weather", json.loads(ARGUMENTS))
    ] * count
    assert parsed(form, [*text, ""]) == whole
    chance = random.Random(1)
    for _ in range(20):
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(3))
        assert parsed(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(FORMS["hermes"], {"weather"})
    pieces = [parser.take(c) for c in f"<tool_call>{CALL}</tool_call>"]
    assert sum(bool(p.calls) for p in pieces) > 20


def test_no_more_than_asked_for() -> None:
    assert len(parsed("mistral", [f"[TOOL_CALLS] [{CALL}, {CALL}]"], most=1)[1]) == 1


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    text = f"<tool_call>{CALL[:-9]}"
    assert parsed("hermes", [text]) == parsed("hermes", [*text]) == ("", [("weather", ARGUMENTS[:-8])])


def test_mistral_ids_have_nine_characters() -> None:
    found = CallParser(FORMS["mistral"], {"weather"}).take(f"[TOOL_CALLS] [{CALL}]", final=True)
    assert len(found.calls[0].id or "") == 9
