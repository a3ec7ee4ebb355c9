"""What clients may ask of `/v1/responses`: the part that needs no memory of earlier requests, turned into a chat."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic.types import Discriminator

from redrafter.serve.messages import Many, Strict
from redrafter.serve.neutral import NEUTRAL, Known, not_supported, without_neutral
from redrafter.serve.schema import SEED, ChatAsked
from redrafter.serve.structured import JsonSchema
from redrafter.serve.tools import MOST_TOOLS

STATELESS: Known = {
    "previous_response_id": ((), "the server keeps nothing: send the earlier messages as input"),
    "conversation": ((), "the server keeps nothing: send the earlier messages as input"),
    "prompt": ((), "the server keeps nothing: send the text as input"),
    "background": ((False,), "answers are given at once"),
    "include": (([],), "there is nothing more to include"),
    "reasoning": (({}, {"effort": "none"}), "the model has no effort setting"),
    "truncation": (("disabled",), "shorten the input"),
    "max_tool_calls": ((), "the server runs no tools"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
}
DEEPEST = 64
"""Levels of a field's value: a response repeats many fields, and deeper values cannot be written."""
CHAT_NAMES = {
    "messages": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
"""Fields of the chat that a response becomes -> what the client calls them."""


class Part(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Many[Any] = Field(default_factory=list, description="taken and not used")
    logprobs: Many[Any] = Field(default_factory=list, description="taken and not used")


def _text_only(content: Any) -> Any:
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in ("input_text", "output_text", "text"):
            raise not_supported("input", f"content parts must be text, got {str(kind)[:40]!r}: the model reads text")
    return content


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | Many[Part], BeforeValidator(_text_only)]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str | Many[Part], BeforeValidator(_text_only)]
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ChosenFunction(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool = Field(default=True, description="the schema is always kept to")


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="the model has no verbosity setting")


class ResponsesAsked(Strict):
    model: str
    input: str | Many[Item]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-SEED, le=SEED - 1, description="ours")
    speculative: bool = Field(True, description="ours: false decodes this answer plainly")
    text: TextOptions | None = None
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: dict[str, bool] | None = Field(None, description="taken and not used")
    store: bool | None = Field(None, description="false: `redrafter serve --remember-answers` leaves this answer out")
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, description="taken and not used")
    safety_identifier: str | None = Field(None, description="taken and not used")
    prompt_cache_key: str | None = Field(None, description="taken and not used")

    @model_validator(mode="before")
    @classmethod
    def _defaults_ask_for_nothing(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        for name in cls.model_fields.keys() & content.keys():
            if problem := unsendable(content[name]):
                raise not_supported(name, f"{name} {problem}")
        known = {k: v for k, v in (NEUTRAL | STATELESS).items() if k not in cls.model_fields}
        return without_neutral({k: v for k, v in content.items() if v is not None}, known)

    def chat(self) -> ChatAsked:
        """The chat that this asks for; pydantic's ValidationError speaks of the chat's fields."""
        names = ("model", "temperature", "top_p", "seed", "speculative", "parallel_tool_calls", "stream", "store")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        fields["messages"] = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        choice = self.tool_choice
        fields["tool_choice"] = (
            choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
        )
        form = self.text.format if self.text is not None else None
        if form is not None:
            schema = {"name": form.name or "answer", "schema": form.schema_} if form.type == "json_schema" else None
            fields["response_format"] = {"type": form.type, "json_schema": schema}
        return ChatAsked.model_validate(fields)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": _joined(item.content)})
            elif isinstance(item, ResultItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
            else:
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if messages and messages[-1]["role"] == "assistant":  # a turn's words and calls are one message
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        return messages


def unsendable(given: Any) -> str | None:
    """Why a response cannot repeat a value, if it cannot.

    >>> unsendable({"a": ["b"]}), unsendable({"a": "\\ud800"})
    (None, 'holds half a surrogate pair, which is no text')
    """
    left, texts = [(given, 0)], [given] if isinstance(given, str) else []
    while left:
        value, depth = left.pop()
        if depth > DEEPEST:
            return f"is nested more than {DEEPEST} levels deep"
        if isinstance(value, dict | list):
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            texts += [item for item in inner if type(item) is str]  # there may be a million
            left += [(item, depth + 1) for item in inner if type(item) in (dict, list)]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is no text"
    return None


def _joined(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
