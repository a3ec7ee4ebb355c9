"""The generation function that transformers loads from `redrafter.CUSTOM_GENERATE_FOLDER`.

transformers copies this file into a cache and executes the copy, so the file imports by full names only.
"""

from typing import Any

from redrafter.engine import custom_generate


def generate(model: Any, streamer: Any = None, **options: Any) -> Any:
    """`model.generate(custom_generate=redrafter.custom_generate)` that also takes a `streamer`."""
    # The class's method: `model.generate` is this function where a model's own folder holds this file.
    return type(model).generate(model, custom_generate=custom_generate, stream_to=streamer, **options)
