"""Calls found in texts of each family, whole and piece by piece."""

import json
import random

import pytest

from redrafter.serve.tool_calls import FORMS, CallParser, FormName, calls_of

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
    ("hermes", f"One <tool_call>{CALL}</tool_call> two <tool_call>{CALL}</tool_call> three", "One  two  three", 2),
    ("hermes", '<tool_call>{"name": "a\\q", "arguments": {}} and on', '{"name": "a\\q", "arguments": {}} and on', 0),
    ("hermes", '<tool_call>{"name": "a\nb", "arguments": {}}', '{"name": "a\nb", "arguments": {}}', 0),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}', 0),
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
    order = in_order(parser, pieces)
    return "".join(x for x in order if isinstance(x, str)), [x for x in order if not isinstance(x, str)]


def in_order(parser: CallParser, pieces: list[str]) -> list[str | tuple[str, str]]:
    """Words and whole calls as they come."""
    order: list[str | tuple[str, str]] = []
    calls = -1
    for i, text in enumerate(pieces):
        for piece in parser.take(text, final=i == len(pieces) - 1):
            last = order[-1] if order else None
            if isinstance(piece, str):
                order[-1:] = [last + piece] if isinstance(last, str) else [*order[-1:], piece]
            elif piece.index == calls:
                assert isinstance(last, tuple), "a call's pieces have no words between them"
                order[-1] = (last[0], last[1] + piece.arguments)
            else:
                calls += 1
                assert piece.index == calls
                assert piece.name
                assert piece.id
                order.append((piece.name, piece.arguments))
    return order


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
    assert sum(bool(p) for p in pieces) > 20


def test_no_more_than_asked_for() -> None:
    assert len(parsed("mistral", [f"[TOOL_CALLS] [{CALL}, {CALL}]"], most=1)[1]) == 1


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    text = f"<tool_call>{CALL[:-9]}"
    assert parsed("hermes", [text]) == parsed("hermes", [*text]) == ("", [("weather", ARGUMENTS[:-8])])


def test_mistral_ids_have_nine_characters() -> None:
    found = CallParser(FORMS["mistral"], {"weather"}).take(f"[TOOL_CALLS] [{CALL}]", final=True)
    assert len(calls_of(found)[0].id or "") == 9


def test_words_before_between_and_after_calls_keep_their_order() -> None:
    text = f"One <tool_call>{CALL}</tool_call> two <tool_call>{CALL}</tool_call> three"
    chance = random.Random(2)
    for _ in range(50):
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found = in_order(CallParser(FORMS["hermes"], {"weather"}), pieces)
        assert found == ["One ", ("weather", ARGUMENTS), " two ", ("weather", ARGUMENTS), " three"]


def test_arguments_can_always_be_sent() -> None:
    for arguments in ('{"a": "\\ud800 é"}', '"\\ud800"'):
        text = f'{{"arguments": {arguments}, "name": "weather"}}'
        ((_, told),) = parsed("json", [text])[1]
        assert told.encode()
        assert not arguments.startswith("{") or json.loads(told) == json.loads(arguments)
