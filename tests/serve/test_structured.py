"""Structured output over HTTP: `response_format` with the official client, vLLM's fields, and what is refused."""

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from redrafter.serve.model import Served
from tests.helpers.bytes import byte_target
from tests.helpers.serving import NAME, make_served, plain, running

HELLO = [{"role": "user", "content": "name"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served(byte_target(), context=200)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with running(served) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 60} | options
    return client.chat.completions.create(**given, extra_body=extra or {})


def test_a_schema_is_kept_to_alone_and_beside_others(client: openai.OpenAI, served: Served) -> None:
    options = {"response_format": FORMAT, "temperature": 1.0}
    alone = plain(served).generate([HELLO] * 4, grammar=SCHEMA, temperature=1.0, seed=[1, 2, 3, 4], max_new_tokens=60)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        free = [threads.submit(ask, client, temperature=1.0, seed=s) for s in range(3)]
        texts = list(threads.map(lambda s: ask(client, **options, seed=s).choices[0].message.content, (1, 2, 3, 4)))
        assert all(f.result().choices for f in free)
    assert texts == [c.text for c in alone]
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    chunks = ask(client, **options, seed=1, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == texts[0]


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[ab]{3}x"}, "[ab]{3}x"),
        ({"guided_grammar": 'start: "[" /[ab]{2}/ "]"'}, r"\[[ab]{2}\]"),
        ({"guided_json": {"const": "q"}}, '"q"'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "z+1"}}, "z+1"),
        ({"structured_outputs": {"json": json.dumps({"type": "boolean"})}}, "true|false"),
    ],
    ids=str,
)
def test_vllms_names(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    done = ask(client, extra, temperature=1.0, seed=5).choices[0]
    assert done.finish_reason == "stop"
    assert re.fullmatch(pattern, done.message.content)
    assert client.completions.create(model=NAME, prompt="a", max_tokens=60, seed=1, extra_body=extra).choices[0].text


def test_a_json_object(client: openai.OpenAI, served: Served) -> None:
    likely = {str(served.tokenizer(c).input_ids[0]): bias for c, bias in (('"', 6), ("}", 4), ("\\", -100))}
    for extra in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        done = ask(client, extra, temperature=1.0, seed=2, max_tokens=100, logit_bias=likely).choices[0]
        assert done.finish_reason == "stop"
        assert json.loads(done.message.content) != {}


@pytest.mark.parametrize(
    ("extra", "param", "what"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"guided_json": {"type": "robot"}}, "guided_json", "Invalid type: robot"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": True}, "guided_json", "must be an object, got true"),
        ({"structured_outputs": {"json": "false"}}, "structured_outputs", "must be an object, got false"),
        ({"guided_regex": "(a"}, "guided_regex", "not valid"),
        ({"guided_choice": []}, "guided_choice", "one or more"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "both ask"),
        ({"structured_outputs": {"shape": 1}}, "structured_outputs", "shape"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave ignore_eos out"),
        ({"guided_json": {"enum": ["x" * 9] * 40_000}}, "guided_json", "at most 262144"),
    ],
    ids=lambda x: str(x)[:50],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, extra: dict[str, Any], param: str, what: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra)
    assert caught.value.param == param
    assert what in caught.value.message
