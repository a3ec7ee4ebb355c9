"""Bodies that are short and take long: what is wrong a million times, and what has a million fields."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from redrafter.serve.bodies import MOST_FIELDS, check_fields, fields_in
from redrafter.serve.errors import Refused
from redrafter.serve.responses_schema import ResponsesAsked, unsendable
from redrafter.serve.schema import ChatAsked, CompletionAsked, DetokenizeAsked, TokenizeAsked
from tests.helpers.serving import NAME, make_served, running
from tests.serve.test_http import post

ASKED = (ChatAsked, CompletionAsked, DetokenizeAsked, ResponsesAsked, TokenizeAsked)
WRONG: list[Any] = [1, -1, "", {}, [], None, True]
"""Of these, each field refuses some."""
MANY = 10_000
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
    ("path", "field", "text"),
    [
        ("/v1/completions", "prompt", '[1,%s""]' % ('"",' * 10 * MANY)),
        ("/v1/chat/completions", "messages", "[%s1]" % ("1," * 10 * MANY)),
        ("/v1/chat/completions", "messages", "[%s1]" % ('{"role":"user","content":""},' * 10 * MANY)),
        ("/v1/responses", "input", "[%s1]" % ("{}," * 10 * MANY)),
        ("/v1/completions", "logit_bias", json.dumps(dict.fromkeys(range(10 * MANY), "x"))),
    ],
)  # fmt: skip
def test_the_server_says_so_at_once(url: str, path: str, field: str, text: str) -> None:
    began = time.monotonic()
    status, answer = post(url, f'{{"model":"{NAME}","{field}":{text}}}'.encode(), path)
    assert (status, "\n" in answer["error"]["message"]) == (400, False)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("item", [1, "a"])
def test_a_long_list_of_a_response_is_looked_at_quickly(item: Any) -> None:
    given = [item] * 2**20
    began = time.process_time()
    assert unsendable(given) is None
    assert time.process_time() - began < 1.5
    assert unsendable([*given, "\ud800"]) == "holds half a surrogate pair, which is no text"
    assert unsendable({"a": [{"\ud800": 1}]}) == "holds half a surrogate pair, which is no text"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(make_served()) as address:
        yield address
