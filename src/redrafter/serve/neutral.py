"""Fields of OpenAI's and vLLM's APIs that this server knows by name and does not support.

SDKs and frameworks send many fields at their defaults. A default asks for nothing, so the field is dropped. Any other
value is refused by the field's own name, since ignoring the field would answer another question than the one asked.
"""

from typing import Any

from pydantic_core import PydanticCustomError

Known = dict[str, tuple[tuple[Any, ...], str]]
"""Field -> the values that ask for nothing, and why no other value is taken."""

NEUTRAL: Known = {
    "service_tier": (("auto", "default"), "there is one tier"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "web_search_options": ((), "the server searches nothing"),
    "reasoning_effort": (("none",), "the model has no effort setting"),
    "verbosity": (("medium",), "the model has no verbosity setting"),
    "echo": ((False,), "it belongs to /v1/completions"),
    "best_of": ((1,), "it belongs to /v1/completions"),
    "tools": (([],), "they belong to /v1/chat/completions"),
    "tool_choice": (("none", "auto"), "it belongs to /v1/chat/completions"),
    "parallel_tool_calls": ((True, False), "it belongs to /v1/chat/completions"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "suffix": (("",), "text is continued at its end only"),
    "use_beam_search": ((False,), "the text is the model's own choice, token by token"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "min_tokens": ((0,), "use ignore_eos with max_tokens"),
    "stop_token_ids": (([],), "use stop"),
    "bad_words": (([],), "use logit_bias"),
    "include_stop_str_in_output": ((False,), "the text ends before the stop string"),
    "skip_special_tokens": ((True,), "special tokens are no text"),
    "spaces_between_special_tokens": ((True,), "special tokens are no text"),
    "return_token_ids": ((False,), "use /tokenize"),
    "return_tokens_as_token_ids": ((False,), "use /tokenize"),
    "priority": ((0,), "requests are served in order of arrival"),
    "documents": (([],), "put the documents into messages"),
    "chat_template_kwargs": (({},), "the chat template has no settings here"),
}


def without_neutral(content: dict[str, Any], known: Known) -> dict[str, Any]:
    """The fields without those that ask for nothing; raises for one that asks for something.

    >>> without_neutral({"n": 2, "service_tier": "auto"}, NEUTRAL)
    {'n': 2}
    """
    kept = {}
    for name, value in content.items():
        if name not in known:
            kept[name] = value
            continue
        values, why = known[name]
        if not any(type(value) is type(one) and value == one for one in values):
            remedy = f"leave the field out or send {values[0]!r}" if values else "leave the field out"
            raise not_supported(name, f"this value of {name} is not supported ({why}): {remedy}")
    return kept


def not_supported(param: str, message: str) -> PydanticCustomError:
    """A validation error that names its parameter itself, wherever it is raised."""
    return PydanticCustomError("not_supported", "{message}", {"message": message, "param": param})
