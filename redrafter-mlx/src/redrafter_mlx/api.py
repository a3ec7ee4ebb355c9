"""`load`, `generate`, `stream_generate`: shaped like mlx-lm's, so that code changes one import."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx import profiles, selfcheck
from redrafter_mlx.config import Shape
from redrafter_mlx.decode import PromptCache, Response
from redrafter_mlx.drafter import NoDrafter
from redrafter_mlx.engine import Engine, make_drafter
from redrafter_mlx.errors import ConfigError, CorruptCheckpoint, ModelNotFound, RedrafterError
from redrafter_mlx.target import Target

REPLACED = {
    "sampler": "temperature, top_k, top_p and min_p",
    "logits_processors": "repetition_penalty, presence_penalty and frequency_penalty",
    "draft_model": "the drafter given to redrafter_mlx.load",
    "num_draft_tokens": "the shape given to redrafter_mlx.load",
}
"""Options of mlx-lm's generate that redrafter_mlx has its own words for."""


def load(model: str, *, drafter: str = "auto", shape: Shape | str | None = None, **options: Any) -> tuple[Engine, Any]:
    """An engine and its tokenizer: mlx-lm's `load`, then `wrap`. Options go to mlx-lm's `load`.

    model: a folder or a Hugging Face id that mlx-lm can load, quantised or not. drafter: see `engine.make_drafter`.
    shape: a `Shape` or a text such as "2x3:4"; by default what `redrafter-mlx tune` found, else the drafter's own.
    """
    chosen = Shape.of(shape) if isinstance(shape, str) else shape
    try:
        loaded, tokenizer, _ = load_model(model, **options)
    except Exception as error:  # of mlx-lm, huggingface_hub, transformers: any
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not Path(model).exists():
            raise ModelNotFound(
                f"cannot find the model {model!r} ({reason}); give a folder or a Hugging Face id"
            ) from error
        raise CorruptCheckpoint(f"mlx-lm cannot load {model} ({reason})") from error
    return wrap(loaded, tokenizer, name=Path(model).name, drafter=drafter, shape=chosen), tokenizer


def load_model(model: str, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """mlx-lm's model, tokenizer and config, with the rotary base that a config of transformers 5 names.

    transformers 5 writes `rope_theta` inside `rope_parameters`, where many of mlx-lm's models do not look: they would
    use the default base and write another text than the model's own.
    """
    loaded, tokenizer, config = mlx_lm.load(model, return_config=True, **options | {"lazy": True})
    rotary = config.get("rope_parameters")
    if isinstance(rotary, dict) and "rope_theta" in rotary and "rope_theta" not in config:
        moved = {"rope_theta": rotary["rope_theta"]}
        if rotary.get("rope_type", "default") != "default":
            moved["rope_scaling"] = rotary
        own = moved | (options.get("model_config") or {})
        options = options | {"lazy": True, "model_config": own}
        loaded, tokenizer, config = mlx_lm.load(model, return_config=True, **options)
    mx.eval(loaded.parameters())
    return loaded, tokenizer, config


def wrap(
    model: Any, tokenizer: Any = None, *, name: str = "", drafter: str = "auto", shape: Shape | str | None = None
) -> Engine:
    """An engine around a model that mlx-lm has loaded. `Engine.close` hands the model back as it came."""
    if tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    target = Target(model, tokenizer, name)
    try:
        selfcheck.check(target)
        found = make_drafter(drafter, target)
        chosen = Shape.of(shape) if isinstance(shape, str) else shape
        if chosen is None and found.layers:
            fastest = profiles.find(target, found.name)
            if fastest == "plain":
                found = NoDrafter()
            elif fastest:
                chosen = Shape.of(fastest)
        return Engine(target, found, chosen)
    except RedrafterError:
        target.release()
        raise


def stream_generate(
    model: Engine,
    tokenizer: Any,  # noqa: ARG001 - the engine has it; the argument is mlx-lm's
    prompt: Any,
    max_tokens: int = 256,
    *,
    prompt_cache: PromptCache | None = None,
    **options: Any,
) -> Iterator[Response]:
    """mlx-lm's `stream_generate`: one response for each token. Options are those of `Engine.generate`.

    `prompt_cache`: keeps what was read between calls. Other than in mlx-lm, each prompt is the whole conversation, and
    what is known of it is not read again.
    """
    if not isinstance(model, Engine):
        raise ConfigError(f"redrafter_mlx generates with what redrafter_mlx.load returns, got {type(model).__name__}")
    for name in REPLACED:
        if options.pop(name, None) is not None:
            raise ConfigError(f"redrafter_mlx has no {name}: use {REPLACED[name]}")
    prompt = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    yield from model.stream(prompt, prompt_cache=prompt_cache, max_new_tokens=max_tokens, **options)


stream = stream_generate


def generate(model: Engine, tokenizer: Any, prompt: Any, **options: Any) -> str:
    """mlx-lm's `generate`: the whole text."""
    options.pop("verbose", None)
    return "".join(response.text for response in stream_generate(model, tokenizer, prompt, **options))
