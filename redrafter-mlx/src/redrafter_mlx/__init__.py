"""Speculative decoding with a recurrent drafter, for mlx-lm's models: their own text, token for token, in fewer passes.

>>> import redrafter_mlx
>>> redrafter_mlx.Shape.of("2x3:4").budget
4
"""

from typing import Any

from redrafter_mlx.config import SamplingParams, Shape
from redrafter_mlx.errors import ModelNotFound, RedrafterError
from redrafter_mlx.version import __version__

_IN_API = ("load", "wrap", "generate", "stream", "stream_generate", "Engine", "PromptCache")

__all__ = ["RedrafterError", "SamplingParams", "Shape", "__version__", *_IN_API]


def __getattr__(name: str) -> Any:
    """mlx is imported when it is first needed, so that `redrafter-mlx --help` answers at once."""
    if name not in _IN_API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from redrafter_mlx import api
    except ImportError as error:
        raise ModelNotFound(
            f"mlx-lm cannot be imported ({error}): pip install mlx-lm on a Mac, pip install 'mlx-lm[cpu]' on Linux "
            "(glibc 2.35 or later)"
        ) from error
    return getattr(api, name)
