"""Bodies that are short and take long: what is wrong a million times, and what has a million fields."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from redrafter.serve import reading
from redrafter.serve.bodies import MOST_FIELDS, check_fields, fields_in
from redrafter.serve.errors import Refused
from redrafter.serve.responses_schema import ResponsesAsked, unsendable
from redrafter.serve.schema import ChatAsked, CompletionAsked, DetokenizeAsked, TokenizeAsked
from tests.helpers.serving import NAME, make_served, running
from tests.serve.test_http import post

ASKED = (ChatAsked, CompletionAsked, DetokenizeAsked, ResponsesAsked, TokenizeAsked)
WRONG: list[Any] = [1, -1, "", {}, [], None, True]
"""Of these, each field refuses some."""
MANY = 1_000
SHORT = 128
"""Items of a list that may all be looked at, whatever is wrong with them."""


def lists_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists in a schema of pydantic's core."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for value in schema.values():
            yield from lists_in(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from lists_in(value)


@pytest.mark.parametrize("asked", ASKED)
def test_no_list_is_looked_through_for_every_error(asked: type[BaseModel]) -> None:
    lists = list(lists_in(asked.__pydantic_core_schema__))
    assert lists
    for found in lists:
        assert found.get("fail_fast") or found.get("max_length", MANY) <= SHORT, found


@pytest.mark.parametrize("asked", ASKED)
def test_errors_are_few(asked: type[BaseModel]) -> None:
    most = 0
    for name in asked.model_fields:
        for wrong in WRONG:
            for value in ([wrong] * MANY, [1] + [wrong] * MANY):
                try:
                    asked.model_validate({name: value})
                except ValidationError as error:
                    most = max(most, error.error_count())
    assert 0 < most < 2 * SHORT


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ([], 1),
        ({"a": [1, 2, {"b": None}]}, 5),
        ("{[:" * 9, 0),
        ('"{"' * 9, 0),
        (["\\", {}, '\\"{', '\\\\"', {"\\": "{:"}], 4),
    ],
)
def test_fields_are_counted(value: Any, count: int) -> None:
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=3)):
        assert fields_in(text.encode()) == count


def test_many_fields_are_refused() -> None:
    check_fields(json.dumps([{}] * (MOST_FIELDS - 1)).encode())
    check_fields(json.dumps(["{[:"] * MOST_FIELDS).encode())
    with pytest.raises(Refused, match=f"{MOST_FIELDS + 1} objects, lists and fields"):
        check_fields(json.dumps([{}] * MOST_FIELDS).encode())


@pytest.mark.parametrize(
    ("path", "field", "text", "read"),
    [
        ("/v1/completions", "prompt", '[1,%s""]' % ('"",' * 100 * MANY), True),
        ("/v1/chat/completions", "messages", "[%s1]" % ("1," * 100 * MANY), True),
        ("/v1/chat/completions", "messages", "[%s1]" % ('{"role":"user","content":""},' * 100 * MANY), False),
        ("/v1/responses", "input", "[%s1]" % ("{}," * 100 * MANY), False),
        ("/v1/completions", "logit_bias", json.dumps(dict.fromkeys(range(100 * MANY), "x")), False),
    ],
)  # fmt: skip
def test_the_server_says_so_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch, path: str, field: str, text: str, read: bool
) -> None:
    """What has many fields is not even read, and of what is read few errors are gathered."""
    errors: list[int] = []

    class Counted(RequestValidationError):
        def __init__(self, found: Sequence[Any]) -> None:
            errors.append(len(found))
            super().__init__(found)

    monkeypatch.setattr(reading, "RequestValidationError", Counted)
    status, answer = post(url, f'{{"model":"{NAME}","{field}":{text}}}'.encode(), path)
    assert (status, "\n" in answer["error"]["message"]) == (400, False)
    assert ("objects, lists and fields" in answer["error"]["message"]) == (not read)
    assert len(errors) == read
    assert sum(errors) < 2 * SHORT


def calls_in(what: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, are called."""
    calls, before = 0, sys.getprofile()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("item", [1, "a"])
def test_a_long_list_of_a_response_is_looked_at_quickly(item: Any) -> None:
    """No function is called for each item."""
    given = [item] * MANY
    assert unsendable(given) is None
    assert calls_in(lambda: unsendable(given)) < 100
    assert unsendable([*given, "\ud800"]) == "holds half a surrogate pair, which is no text"
    assert unsendable({"a": [{"\ud800": 1}]}) == "holds half a surrogate pair, which is no text"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(make_served()) as address:
        yield address
