"""Prompts as token ids."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redrafter.bounds import check_value, shown
from redrafter.errors import ConfigError, first_line
from redrafter.targets import Target

Messages = Sequence[Mapping[str, Any]]


def encode(target: Target, prompt: str | Messages, **template: Any) -> list[int]:
    """See `Engine.encode`."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{target.name} came without a tokenizer: give token ids, or tokenizer=...")
    if isinstance(prompt, str):
        check_value("prompt", prompt, str)
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise ConfigError(f"{target.name} has no chat template: give the prompt as plain text")
    check_value("prompt", prompt, Messages)
    for message in prompt:
        check_message(message)
    options = {"add_generation_prompt": True} | template
    try:
        encoded = tokenizer.apply_chat_template(list(prompt), return_dict=True, **options)
    except Exception as error:  # the template is a program that came with the model
        raise ConfigError(f"{target.name} cannot write this chat by its template: {first_line(error)}") from error
    return list(encoded["input_ids"])


def check_message(message: Mapping[str, Any]) -> None:
    """Raise ConfigError for a chat message that has no role or no content."""
    if not {"role", "content"} <= set(message):
        raise ConfigError(f"a chat message needs 'role' and 'content', got {shown(message)}")
    check_value("the role of a chat message", message["role"], str)
    if message["content"] is not None or not message.get("tool_calls"):  # a call needs no text
        check_value("the content of a chat message", message["content"], str | Messages)
    for part in message["content"] if isinstance(message["content"], list | tuple) else ():
        if part.get("type") != "text":
            raise ConfigError(f"a chat message has a part of the type {shown(part.get('type'))}: only text is read")


def prompt_ids(prompt: Any, encode: Callable[[str | Messages], list[int]]) -> list[int]:
    """Of text, chat messages or token ids."""
    if isinstance(prompt, str):
        return encode(prompt)
    ids = as_items(prompt)
    if ids and isinstance(ids[0], Mapping):
        return encode(ids)
    check_value("prompt", ids, Sequence[int])
    return [int(token) for token in ids]


def as_items(prompt: Any) -> list[Any]:
    """What a list, a tensor or an array holds; bytes are no token ids, and a set has no order."""
    items = as_plain(prompt)
    if not hasattr(items, "__iter__") or isinstance(items, bytes | bytearray | memoryview | set | frozenset | Mapping):
        raise ConfigError(f"a prompt is text, token ids or chat messages, not {shown(prompt)}")
    return list(items)


def as_plain(given: Any) -> Any:
    """What a tensor or an array holds; anything else as it is."""
    try:
        return given.tolist() if hasattr(given, "tolist") else given
    except Exception as error:  # such as a sparse tensor's
        raise ConfigError(f"{shown(given)} holds no numbers that can be read: {first_line(error)}") from None


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ConfigError for an empty prompt, and for ids outside the vocabulary: they index tensors and C++ arrays."""
    if not ids:
        raise ConfigError("the prompt is empty: give at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ConfigError(f"the prompt has token ids outside the vocabulary of {vocab_size}")
