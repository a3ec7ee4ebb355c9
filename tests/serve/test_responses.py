"""`/v1/responses` with the official client: text, streams, tools, structured output, what is refused."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from redrafter.engine.request import Part
from redrafter.runtime.row import RowOutput
from redrafter.serve.errors import first_problem
from redrafter.serve.job import Event
from redrafter.serve.model import Served
from redrafter.serve.responses import ResponsesAnswer
from redrafter.serve.responses_schema import ResponsesAsked
from redrafter.serve.tool_calls import FORMS, CallParser
from tests.helpers.bytes import byte_target
from tests.helpers.serving import NAME, make_served, plain, running

PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
NESTED: dict[str, Any] = {}
for _ in range(150):
    NESTED = {"properties": NESTED}
TOOL = {"type": "function", "name": "pick", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served(byte_target(max_position_embeddings=1024), context=900)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with running(served) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": NAME, "input": "name", "temperature": 1.0, "max_output_tokens": 40, "extra_body": {"seed": 4}}
    return client.responses.create(**(given | options))


def test_text_is_that_of_plain_decoding(client: openai.OpenAI, served: Served) -> None:
    talk = [{"role": "system", "content": "yes"}, {"role": "user", "content": "name"}]
    alone = plain(served).generate([talk], temperature=1.0, seed=4, max_new_tokens=40)[0]
    done = ask(client, instructions="yes")
    assert done.output_text == alone.text
    assert done.status == ("completed" if alone.finish_reason == "stop" else "incomplete")
    assert done.usage.output_tokens == len(alone.tokens)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "na"}, {"type": "input_text", "text": "me"}]}]
    assert ask(client, input=parts, instructions="yes").output_text == alone.text


def test_a_stream_is_the_whole_answer_in_events(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    kinds = [e.type for e in events if not e.type.endswith("delta")]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        f"response.{whole.status}",
    ]  # fmt: skip
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert events[0].response.output == []


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    options = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "pick"}, "max_output_tokens": 80}
    (call,) = ask(client, **options).output
    assert (call.type, call.name, call.status) == ("function_call", "pick", "completed")
    assert json.loads(call.arguments)["a"] in (1, 2)
    events = list(ask(client, **options, stream=True))
    pieces = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    (streamed,) = events[-1].response.output
    assert pieces == streamed.arguments == call.arguments
    turns = [
        {"role": "user", "content": "name"},
        call.model_dump(exclude_none=True, exclude={"namespace"}),
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
    ]
    assert ask(client, input=turns, tools=[TOOL]).output


@pytest.mark.parametrize("cut", [10, 30, 60, 85, 200])
def test_words_after_a_call(served: Served, cut: int) -> None:
    """The events of an answer whose text comes in two pieces."""
    asked = ResponsesAsked.model_validate({"model": NAME, "input": "a", "tools": [TOOL]})
    answer = ResponsesAnswer(asked, asked.chat(), served.jobs(asked.chat(), lambda *_: None), served)
    answer.parsers = [CallParser(FORMS["hermes"], {"pick"})]
    text = 'So: <tool_call>{"name": "pick", "arguments": {"a": 1}}</tool_call> done'
    stats = answer.jobs[0].writer.stats
    events = []
    for piece, reason in ((text[:cut], None), (text[cut:], "stop")):
        answer.take(0, Event(Part(0, piece, [], 0, stats, reason, []), RowOutput([])))
        events += answer.chunks(0, Event(None, None))
    kinds = [(item["type"], item["status"]) for item in answer.whole()["output"]]
    assert kinds == [("message", "completed"), ("function_call", "completed"), ("message", "completed")]
    assert [item["arguments"] for item in answer.items if "arguments" in item] == ['{"a": 1}']
    assert answer.items[-1]["content"][0]["text"] == " done"
    assert sum(e["type"] == "response.output_item.done" for e in events) == 3


def test_structured_output(client: openai.OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}}
    assert json.loads(ask(client, text=form).output_text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("options", "param", "what"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps nothing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "must be text",
        ),
        ({"input": []}, "input", "at least 1 item"),
        ({"background": True}, "background", "at once"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'function'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "robot"}}}}, "text", "robot"),
        ({"max_output_tokens": 5000}, "input", "max_output_tokens is 5000"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL]}, "text", "text leaves no room"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_refused(client: openai.OpenAI, options: Any, param: str, what: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options)
    assert what in caught.value.message
    assert caught.value.param == param


def test_what_no_response_can_repeat_is_refused() -> None:
    """The official client cannot send half a surrogate pair; other clients can."""
    for options, param, what in (
        ({"metadata": {"a": "\ud800"}}, "metadata", "surrogate"),
        ({"tools": [TOOL | {"description": "\udfff"}], "tool_choice": "none"}, "tools", "surrogate"),
        ({"tools": [TOOL | {"parameters": NESTED}], "tool_choice": "none"}, "tools", "levels deep"),
    ):
        with pytest.raises(ValidationError) as caught:
            ResponsesAsked.model_validate({"model": NAME, "input": "a"} | options)
        message, named = first_problem(caught.value.errors())
        assert (named, what in message) == (param, True), message
