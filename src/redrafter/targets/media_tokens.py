"""Token ids that stand for what is no text. Their embeddings would be read as if they were words."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redrafter.errors import ConfigError

FIELD = re.compile(r"(image|video|audio)_token_(id|index)")


def media_tokens(config: Any) -> dict[int, str]:
    """By the configuration of a model that reads more than text: the id -> what it stands for."""
    text = config.get_text_config()
    if config is text:
        return {}
    ids: dict[int, str] = {}
    for name, value in vars(config).items():
        field = FIELD.fullmatch(name)
        if field and isinstance(value, int):
            ids[value] = field[1]
        elif hasattr(value, "get_text_config") and value.get_text_config() is text:  # between this one and the text's
            ids |= media_tokens(value)
    return ids


def check_text_only(prompt: Sequence[int], media: Mapping[int, str], name: str) -> None:
    """Raise ConfigError for a prompt with an image, a video or a sound."""
    for token in media.keys() & set(prompt):
        raise ConfigError(
            f"the prompt has the token {token}, the place of an image, a video or a sound ({media[token]}): "
            f"{name} reads text only; leave it out"
        )
