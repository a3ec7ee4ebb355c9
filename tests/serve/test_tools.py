"""Tools over HTTP: through the chat template, enforced by a grammar, found in the answer, whole and streamed."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import openai
import pytest

from redrafter.serve.model import Served
from redrafter.serve.tool_calls import FORMS, FormName
from tests.helpers.bytes import TEMPLATE, byte_target
from tests.helpers.serving import NAME, make_served

HELLO = [{"role": "user", "content": "name"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "at": {"$ref": "#/$defs/time"}},
    "required": ["city", "at"],
    "additionalProperties": False,
    "$defs": {"time": {"type": "integer", "minimum": 0, "maximum": 23}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [WEATHER, STOP]
MARKS: dict[FormName, str] = {"hermes": "<tool_call>", "llama3": "python_tag", "mistral": "[TOOL_CALLS]", "json": ""}


def template(form: FormName) -> str:
    """Messages as dictionaries, so that tests see all that a template gets; the model's own mark of calls."""
    told = "{% if tools %}tools={{ tools | tojson }}{% endif %}{# " + MARKS[form] + " #}" if form != "json" else ""
    body = "{% for m in messages %}<{{ m.role }}>{{ m | tojson }}<end>{% endfor %}" if form != "json" else None
    ending = "{% if add_generation_prompt %}<assistant>{% endif %}"
    return told + body + ending if body else TEMPLATE


@pytest.fixture(scope="module", params=list(FORMS))
def served(request: pytest.FixtureRequest) -> Served:
    return make_served(byte_target(template(request.param), max_position_embeddings=2048), context=1500)


def ask(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"model": NAME, "messages": HELLO, "temperature": 1.0, "seed": 3, "max_tokens": 120, "tools": TOOLS}
    return client.chat.completions.create(**(given | options), extra_body=extra or {})


def prompt(url: str, **body: Any) -> str:
    """The text that the chat template makes of messages and tools."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    told = []
    for path, content in (("/tokenize", body), ("/detokenize", {})):
        content = content or {"tokens": told[0]["tokens"]}
        connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
        told.append(json.loads(connection.getresponse().read()))
    connection.close()
    return str(told[1]["prompt"])


def test_a_call_is_enforced_found_and_streamed(client: openai.OpenAI, served: Served) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choices: list[tuple[Any, set[str]]] = [(named, {"weather"}), ("required", {"weather", "stop"})]
    for choice, possible in choices if served.chat.form == "hermes" else choices[:1]:
        options = {"tool_choice": choice, "parallel_tool_calls": False}
        done = ask(client, **options).choices[0]
        assert done.finish_reason == "tool_calls"
        assert done.message.content is None
        (call,) = done.message.tool_calls
        assert call.function.name in possible
        if call.function.name == "weather":
            jsonschema_rs.validate(PARAMETERS, json.loads(call.function.arguments))
        plainly = ask(client, {"speculative": False}, **options).choices[0].message.tool_calls[0].function
        assert (plainly.name, plainly.arguments) == (call.function.name, call.function.arguments)
        pieces, content, reasons = "", "", []
        for chunk in ask(client, **options, stream=True):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            reasons.append(chunk.choices[0].finish_reason)
            for piece in delta.tool_calls or ():
                assert piece.index == 0
                pieces += piece.function.arguments or ""
        assert (pieces, content.strip(), reasons[-1]) == (call.function.arguments, "", "tool_calls")


def test_a_free_answer_may_call_or_speak(client: openai.OpenAI, served: Served) -> None:
    form = FORMS[served.chat.form]
    call = json.dumps({"name": "stop", form.key: {"a": 1}})
    opens = (
        f"<[{served.chat.special[form.opens]}]>" if form.opens in served.chat.special else json.dumps(form.opens or "")
    )
    grammar = {"guided_grammar": f"start: {opens} {json.dumps(call)} {json.dumps(form.closes or '')}"}
    done = ask(client, grammar).choices[0]
    assert done.finish_reason == "tool_calls"
    (made,) = done.message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("stop", {"a": 1})
    for options in ({"tool_choice": "none"}, {"tools": []}):
        spoken = ask(client, grammar, **options).choices[0]
        assert spoken.message.tool_calls is None
        assert call in spoken.message.content
    words = ask(client, {"guided_choice": ["just words"]}).choices[0]
    assert (words.message.content, words.message.tool_calls, words.finish_reason) == ("just words", None, "stop")


def test_the_template_gets_tools_calls_and_results(url: str, served: Served) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    talk = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]
    text = prompt(url, messages=talk, tools=TOOLS)
    assert text.index("weather") < text.index("12 degrees")
    assert '"city": "Oslo"' in text, "arguments are values, not a string"
    assert "12 degrees" in text
    if served.chat.form == "json":
        assert "You can call these functions" in text
        assert "<tool>" not in text
    else:
        assert '"enum": ["Oslo", "Rome"]' in text.split("<user>")[0]
        assert '"tool_call_id": "call_1"' in text


@pytest.mark.parametrize(
    ("options", "param", "what"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among the tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
        ({"tools": [{"type": "robot"}]}, "tools", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice", "another format"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not both"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages", "role 'assistant'"),
        ({"functions": [{"name": "x"}]}, "functions", "use tools"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_wrong_is_named(options: Any, param: str, what: str) -> None:
    from pydantic import ValidationError

    from redrafter.serve.errors import first_problem
    from redrafter.serve.schema import ChatAsked

    with pytest.raises(ValidationError) as caught:
        ChatAsked.model_validate({"model": NAME, "messages": HELLO, "tools": TOOLS} | options)
    message, named = first_problem(caught.value.errors())
    assert (named, what in message) == (param, True), message
