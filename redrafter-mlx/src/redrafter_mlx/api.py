"""`Engine`: requests in, completions out. `load`, `generate`, `stream_generate`: shaped like mlx-lm's."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from redrafter_mlx import profiles, selfcheck
from redrafter_mlx.completion import Completion
from redrafter_mlx.config import SAMPLING, SamplingParams, Shape, require
from redrafter_mlx.decode import Batch, PromptCache, Response
from redrafter_mlx.drafter import NoDrafter, make_drafter
from redrafter_mlx.errors import ConfigError, CorruptCheckpoint, ModelNotFound, RedrafterError
from redrafter_mlx.target import Target

REPLACED = {
    "sampler": "temperature, top_k, top_p and min_p",
    "logits_processors": "repetition_penalty, presence_penalty and frequency_penalty",
    "draft_model": "the drafter given to redrafter_mlx.load",
    "num_draft_tokens": "the shape given to redrafter_mlx.load",
}
"""Options of mlx-lm's generate that redrafter_mlx has its own words for."""


class Engine:
    """Writes the target's own text in fewer passes. `shape` None is the drafter's default."""

    def __init__(self, target: Target, drafter: NoDrafter, shape: Shape | None = None) -> None:
        self.target, self.drafter, self.shape = target, drafter, shape or drafter.default_shape
        if drafter.layers:
            target.record(drafter.layers)

    def plain(self) -> "Engine":
        """The same target under the same rule of choice, decoding token by token."""
        return Engine(self.target, NoDrafter())

    def close(self) -> None:
        """Hand the model back as it came."""
        self.target.release()

    def encode(self, prompt: Any) -> list[int]:
        """Text, chat messages or token ids -> token ids."""
        target, tokenizer = self.target, self.target.tokenizer
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and all(isinstance(x, int) for x in prompt):
            ids = list(prompt)
        elif tokenizer is None:
            raise ConfigError(f"{target.name} came without a tokenizer: give token ids")
        elif isinstance(prompt, str):
            special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
            ids = list(tokenizer.encode(prompt, add_special_tokens=special))
        else:
            ids = self._encode_chat(prompt)
        require(len(ids) >= 1, "the prompt is empty: it has no token")
        for token in ids:
            require(0 <= token < target.vocab_size, f"token {token} is outside the target's vocabulary")
        most = target.max_positions
        require(len(ids) < most, f"the prompt has {len(ids)} tokens and {target.name} a context of {most}: shorten it")
        return ids

    def _encode_chat(self, messages: Any) -> list[int]:
        form = "a prompt is one text, token ids, or chat messages with a 'role' and a 'content' that is a text"
        require(isinstance(messages, Sequence), f"{form}, got {messages!r}")
        for message in messages:
            ok = isinstance(message, Mapping) and "role" in message and isinstance(message.get("content"), str)
            require(ok, f"{form}, got {message!r}")
        tokenizer, name = self.target.tokenizer, self.target.name
        require(tokenizer.has_chat_template, f"{name} has no chat template: give the prompt as plain text")
        try:
            return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"the chat template of {name} refuses the messages: {error}") from error

    def eos_tokens(self) -> list[int]:
        found = getattr(self.target.tokenizer, "eos_token_ids", None)
        return sorted(found) if found else []

    def generate(
        self, prompts: Any, *, batch_size: int = 8, prompt_cache: PromptCache | None = None, **options: Any
    ) -> Any:
        """Completions of one prompt (text, token ids or chat messages) or of a list of them, `batch_size` at a time.

        max_new_tokens: at most this many new tokens. seed: same seed, same text, alone or in any batch; a list gives
        one for each prompt. stop: strings that end the text. ignore_eos: write on past its end. temperature, top_k,
        top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: see `SamplingParams`.
        """
        require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
        single = isinstance(prompts, str) or not prompts or isinstance(prompts[0], int | Mapping)
        rows, params = self.requests([prompts] if single else list(prompts), **options)
        for begin in range(0, len(rows), batch_size):
            some = rows[begin : begin + batch_size]
            for _ in Batch(self.target, self.drafter, self.shape, some, params, prompt_cache).steps():
                pass
        return rows[0] if single else rows

    def stream(self, prompt: Any, *, prompt_cache: PromptCache | None = None, **options: Any) -> Iterator[Response]:
        """A response for each token of one text, as it is decided. Options are those of `generate`."""
        rows, params = self.requests([prompt], **options)
        for responses in Batch(self.target, self.drafter, self.shape, rows, params, prompt_cache).steps():
            yield from responses

    def requests(
        self,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: Any = None,
        stop: Any = (),
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> tuple[list[Completion], SamplingParams]:
        """Check and spell out what is asked for."""
        for name in sampling:
            require(name in SAMPLING, f"there is no option {name!r}; sampling has {', '.join(SAMPLING)}")
        params = SamplingParams(**sampling)
        enough = isinstance(max_new_tokens, int) and max_new_tokens >= 1
        require(enough, f"max_new_tokens must be at least 1, got {max_new_tokens!r}")
        stops = list(stop) if isinstance(stop, list | tuple) else [stop]
        require(all(isinstance(s, str) for s in stops), f"stop must be a text or a list of texts, got {stop!r}")
        require("" not in stops, "a stop string is empty: it would end every text at once")
        require(not stops or self.target.tokenizer is not None, "stop strings need a tokenizer")
        seeds = [secrets.randbits(63) if seed is None else seed for _ in prompts]
        if isinstance(seed, Sequence):
            seeds = list(seed)
            require(len(seeds) == len(prompts), f"got {len(seeds)} seeds for {len(prompts)} prompts")
        require(all(isinstance(own, int) for own in seeds), f"seed must be a whole number, got {seed!r}")
        eos = [] if ignore_eos else self.eos_tokens()
        rows = []
        for prompt, own in zip(prompts, seeds, strict=True):
            ids = self.encode(prompt)
            most = min(max_new_tokens, self.target.max_positions - len(ids))
            rows.append(Completion(ids, most, own, eos, self.target.tokenizer, stops))
        return rows, params


def load(model: str, *, drafter: str = "auto", shape: Shape | str | None = None, **options: Any) -> tuple[Engine, Any]:
    """An engine and its tokenizer: mlx-lm's `load`, then `wrap`. Options go to mlx-lm's `load`.

    model: a folder or a Hugging Face id that mlx-lm can load, quantised or not. drafter: see `drafter.make_drafter`.
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
