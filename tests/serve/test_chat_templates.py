"""Tools with the chat templates of Qwen, Llama 3 and Mistral: what the model reads, and calls that come back."""

import json
from typing import Any

import jsonschema_rs
import openai
import pytest

from redrafter.serve.model import Served
from tests.helpers.bytes import byte_target
from tests.helpers.serving import make_served
from tests.helpers.templates import FAMILIES, Family
from tests.serve.test_tools import PARAMETERS, TOOLS, ask, prompt

NAMED = {"type": "function", "function": {"name": "weather"}}
HELLO = [{"role": "user", "content": "How warm is it?"}]
RENDERED = {
    "qwen": (
        "<tools>\n{tools}\n</tools>",
        '<|im_start|>assistant\n<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call><|im_end|>\n',
        "<|im_start|>user\n<tool_response>\n12 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama": (
        "Environment: ipython",
        'assistant<|end_header_id|>\n\n{{"name": "weather", "parameters": {arguments}}}<|eot_id|>',
        'ipython<|end_header_id|>\n\n"12 degrees"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
    "mistral": (
        "[AVAILABLE_TOOLS] [{tools}][/AVAILABLE_TOOLS][INST] How warm is it?[/INST]",
        '[TOOL_CALLS] [{{"name": "weather", "arguments": {arguments}, "id": "{id}"}}]</s>',
        '[TOOL_RESULTS] {{"content": 12 degrees, "call_id": "{id}"}}[/TOOL_RESULTS]',
    ),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(family: str) -> Served:
    own: Family = FAMILIES[family]
    return make_served(byte_target(own.template, own.special, max_position_embeddings=4096), context=3500)


def test_a_conversation_with_a_call_goes_out_and_comes_back(
    client: openai.OpenAI, url: str, served: Served, family: str
) -> None:
    assert served.chat.form == FAMILIES[family].form
    options: dict[str, Any] = {"messages": HELLO, "tool_choice": NAMED, "parallel_tool_calls": False}
    done = ask(client, **options).choices[0]
    (call,) = done.message.tool_calls
    jsonschema_rs.validate(PARAMETERS, json.loads(call.function.arguments))
    assert (call.function.name, done.finish_reason, done.message.content) == ("weather", "tool_calls", None)

    pieces = [
        piece for chunk in ask(client, **options, stream=True) for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert [piece.function.name for piece in pieces if piece.function.name] == ["weather"]
    assert len(pieces) > 3, "the arguments come as they are written"

    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    talk = [*HELLO, done.message.model_dump(exclude_none=True), result]
    text = prompt(url, messages=talk, tools=TOOLS)
    arguments = json.dumps(json.loads(call.function.arguments))
    wanted = {"arguments": arguments, "id": call.id}
    wanted["tools"] = (", " if family == "mistral" else "\n").join(map(json.dumps, TOOLS))
    places = [text.find(part.format(**wanted)) for part in RENDERED[family]]
    assert places[0] >= 0, text
    assert -1 < places[1] < places[2], text
    assert '"Oslo"' in text, "the tools' schemas"
    assert '"Oslo"' not in prompt(url, messages=HELLO), "twin: no tools, no schemas"


def test_several_calls_and_words_beside_them(client: openai.OpenAI, served: Served, family: str) -> None:
    """Texts as models of the family write them, whole and streamed."""
    body = {key: {"city": "Rome", "at": 7} for key in ("parameters" if family == "llama" else "arguments",)}
    call = json.dumps({"name": "weather", **body})
    mark = served.chat.special.get({"llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}.get(family, ""))
    texts = {
        "qwen": json.dumps(f"Well.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>"),
        "llama": f"<[{mark}]> {json.dumps(f'{call}; {call}')}",
        "mistral": f"<[{mark}]> {json.dumps(f' [{call}, {call}]')}",
    }
    grammar = {"guided_grammar": f"start: {texts[family]}"}
    done = ask(client, grammar, messages=HELLO, max_tokens=400).choices[0]
    assert [json.loads(c.function.arguments) for c in done.message.tool_calls] == [{"city": "Rome", "at": 7}] * 2
    assert done.message.content == ("Well." if family == "qwen" else None)
    streamed: dict[int, str] = {}
    words = ""
    for chunk in ask(client, grammar, messages=HELLO, max_tokens=400, stream=True):
        words += chunk.choices[0].delta.content or ""
        for piece in chunk.choices[0].delta.tool_calls or ():
            streamed[piece.index] = streamed.get(piece.index, "") + piece.function.arguments
    assert list(streamed.values()) == [c.function.arguments for c in done.message.tool_calls]
    assert words.strip() == (done.message.content or "")


def test_what_a_template_refuses_is_the_clients_error(client: openai.OpenAI, family: str) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    if family == "qwen":
        assert ask(client, messages=talk, max_tokens=1).choices
        return
    with pytest.raises(openai.BadRequestError, match=r"single tool-calls|length 9"):
        ask(client, messages=talk, max_tokens=1)
