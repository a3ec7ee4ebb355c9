"""Chat messages as clients send them."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from redrafter.serve.neutral import Known, not_supported, without_neutral

EMPTY: Known = {name: (([], "", {}), "answers have no such part") for name in ("annotations", "refusal", "audio")}
"""Fields that SDKs copy from an answer into the next request's messages."""


Item = TypeVar("Item")
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list of any length. The first wrong item ends its check: a million errors would take a minute and gigabytes."""


class Strict(BaseModel):
    """Unknown fields are refused by name: silently ignoring one would answer another question than the one asked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, content: Any) -> Any:
        return {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else content


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str = "{}"


class MadeCall(Strict):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] = Field("", description="null is allowed for the assistant only")
    name: str | None = None
    tool_calls: Many[MadeCall] | None = Field(None, description="the assistant's only")
    tool_call_id: str | None = Field(None, description="which call this result belongs to; a tool's only")

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        if content.get("content") is None and content.get("role") != "assistant":
            raise not_supported("messages", f"a message of the role {str(content.get('role'))[:20]!r} needs content")
        parts = content.get("content")
        role = content.get("role")
        for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if content.get(name) and role != owner:
                raise not_supported("messages", f"{name} belongs to a message of the role {owner!r}")
        if role == "tool" and not content.get("tool_call_id"):
            raise not_supported("messages", "a message of the role 'tool' needs tool_call_id")
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise not_supported(
                    "messages", f"message parts must have the type 'text', got {str(kind)[:40]!r}: the model reads text"
                )
        return without_neutral({k: v for k, v in content.items() if v is not None}, EMPTY)

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)

    def as_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        told: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            told["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": read(call)}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            told["tool_call_id"] = self.tool_call_id
        return told | ({"name": self.name} if self.name is not None and self.role == "tool" else {})


def read(call: MadeCall) -> Any:
    """A call's arguments as a value: templates write the JSON themselves."""
    try:
        return json.loads(call.function.arguments)
    except ValueError:
        return call.function.arguments
