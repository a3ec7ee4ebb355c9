"""Prompts as token ids."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redrafter.errors import ConfigError
from redrafter.targets import Target

Messages = Sequence[dict[str, str]]


def encode(target: Target, prompt: str | Messages, **template: Any) -> list[int]:
    """See `Engine.encode`."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{target.name} came without a tokenizer: give token ids, or tokenizer=...")
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise ConfigError(f"{target.name} has no chat template: give the prompt as plain text")
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ConfigError(f"a chat message needs 'role' and 'content', got {message!r}")
    options = {"add_generation_prompt": True} | template
    made = tokenizer.apply_chat_template(list(prompt), return_dict=True, **options)
    return list(made["input_ids"])


def prompt_ids(prompt: Any, encode: Callable[[str | Messages], list[int]], vocab_size: int) -> list[int]:
    """Of text, chat messages or token ids; empty prompts and ids outside the vocabulary are refused."""
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
        ids = encode(prompt)
    else:
        ids = [int(t) for t in prompt]
    if not ids:
        raise ConfigError("the prompt is empty: give at least one token")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ConfigError(f"the prompt has token ids outside the vocabulary of {vocab_size}")
    return ids
