"""Structured output as clients ask for it: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator

from redrafter.config import Grammar
from redrafter.errors import ConfigError
from redrafter.serve.messages import Many, Strict
from redrafter.serve.neutral import not_supported

JsonSchema = dict[str, Any] | bool
Choices = Many[str]


class NamedSchema(Strict):
    name: str
    description: str | None = None
    schema_: JsonSchema = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool = Field(default=True, description="the schema is always kept to")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise not_supported(
                "response_format", "response_format needs json_schema with the type 'json_schema', and with no other"
            )
        return self


class StructuredOutputs(Strict):
    """vLLM's: one of these."""

    json_: JsonSchema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Structured(Strict):
    """Fields that chat and completions share."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's")
    guided_json: JsonSchema | str | None = Field(None, description="vLLM's earlier name")
    guided_regex: str | None = Field(None, description="vLLM's earlier name")
    guided_choice: Choices | None = Field(None, description="vLLM's earlier name")
    guided_grammar: str | None = Field(None, description="vLLM's earlier name")

    @property
    def compiles(self) -> bool:
        """Whether a grammar must be compiled, which may take a second."""
        return bool(self._asked())

    def grammar(self) -> tuple[str, Grammar] | None:
        """The grammar that the text must follow and the field that asks for it; ConfigError names the field."""
        asked = list(self._asked())
        if len(asked) > 1:
            raise ConfigError(f"{asked[0][0]} and {asked[1][0]} both ask for structured output: send one of them")
        for name, make, value in asked:
            try:
                return name, make(value)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        return None

    def _asked(self) -> list[tuple[str, Callable[[Any], Grammar], Any]]:
        schema, regex, choices, lark = Grammar.json_schema, Grammar.regex, Grammar.choices, Grammar.lark
        form, other = self.response_format, self.structured_outputs or StructuredOutputs.model_validate({})
        some = None
        if form is not None and form.type != "text":
            some = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
        found: list[tuple[str, Callable[[Any], Grammar], Any]] = [
            ("response_format", schema, some),
            ("structured_outputs", schema, other.json_),
            ("structured_outputs", schema, {"type": "object"} if other.json_object else None),
            ("structured_outputs", regex, other.regex),
            ("structured_outputs", choices, other.choice),
            ("structured_outputs", lark, other.grammar),
            ("guided_json", schema, self.guided_json),
            ("guided_regex", regex, self.guided_regex),
            ("guided_choice", choices, self.guided_choice),
            ("guided_grammar", lark, self.guided_grammar),
        ]
        return [(name, make, value) for name, make, value in found if value is not None]
