"""Tools: what clients may send, how the model is told about them, and the grammar that enforces a call."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from redrafter.config import Grammar
from redrafter.engine.grammar import ONE_LINE
from redrafter.serve.messages import Message, Strict
from redrafter.serve.tool_calls import FORMS, Form, FormName

MOST_TOOLS = 128
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = Field(default=False, description="arguments follow the schema where a call is enforced")


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def form_of(template: str) -> FormName:
    """How the model with this chat template writes calls.

    >>> form_of("... <tool_call> ..."), form_of("{{ messages }}")
    ('hermes', 'json')
    """
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if "python_tag" in template or "Environment: ipython" in template else "json"


INSTRUCTIONS = (
    "You can call these functions:\n{tools}\n"
    'To call a function, answer with nothing but a JSON object: {{"name": "...", "arguments": {{...}}}}'
)
"""What a model is told whose chat template says nothing about tools."""


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates read them."""
    return [
        {"type": "function", "function": t.function.model_dump(exclude_none=True, exclude={"strict"})} for t in tools
    ]


def explained(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages for a chat template that knows no tools: calls and results become text, tools a system message."""
    told: list[dict[str, Any]] = []
    for message in messages:
        made = message.as_template()
        calls, text = made.pop("tool_calls", None), made["content"]
        if calls:
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            made["content"] = "\n".join([text, *written] if text else written)
        if made["role"] == "tool":
            made = {"role": "user", "content": f"The function returned: {text}"}
        told.append(made)
    if not tools:
        return told
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in described(tools))
    system = INSTRUCTIONS.format(tools=listed)
    if told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{system}"}, *told[1:]]
    return [{"role": "system", "content": system}, *told]


def call_grammar(name: FormName, tools: Sequence[Tool], parallel: bool, special: dict[str, int]) -> Grammar:
    """One call or more, in the model's own form. `special` are the ids of special tokens, which are no text."""
    form = FORMS[name]
    rules = []
    for i, tool in enumerate(tools):
        schema = dict(tool.function.parameters or NO_PARAMETERS)
        schema.setdefault("x-guidance", ONE_LINE)
        head = f'{{"name": {json.dumps(tool.function.name)}, "{form.key}": '
        rules += [f"call_{i}: {json.dumps(head)} args_{i} {json.dumps('}')}", f"args_{i}: %json {json.dumps(schema)}"]
    choices = " | ".join(f"call_{i}" for i in range(len(tools)))
    return Grammar.lark("\n".join([f"start: {around(form, parallel, special)}", f"call: {choices}", *rules]))


def around(form: Form, parallel: bool, special: dict[str, int]) -> str:
    """The rule for what stands around calls.

    >>> around(FORMS["hermes"], False, {})
    '"<tool_call>" "\\\\n" call "\\\\n" "</tool_call>"'
    """

    def marker(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    if form.closes is not None and form.opens is not None:
        one = f'{marker(form.opens)} "\\n" call "\\n" {marker(form.closes)}'
        return f'{one} ("\\n" {one})*' if parallel else one
    if form.opens is not None and not form.bare:
        return f'{marker(form.opens)} "[" call{" (" + json.dumps(", ") + " call)*" if parallel else ""} "]"'
    return "call"
