"""`Engine`: a target, a drafter and a shape; requests in, completions out."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redrafter_mlx import checkpoint
from redrafter_mlx.completion import Completion
from redrafter_mlx.config import SAMPLING, SamplingParams, Shape, require
from redrafter_mlx.decode import Batch, PromptCache, Response
from redrafter_mlx.drafter import NgramDrafter, NoDrafter, RecurrentDrafter
from redrafter_mlx.errors import ConfigError, ModelNotFound
from redrafter_mlx.target import Target

TOKENS = 16384  # tokens that a drafter guesses among: the first ones, which are the most frequent


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
            for _ in self._steps(rows[begin : begin + batch_size], params, prompt_cache):
                pass
        return rows[0] if single else rows

    def stream(self, prompt: Any, *, prompt_cache: PromptCache | None = None, **options: Any) -> Iterator[Response]:
        """A response for each token of one text, as it is decided. Options are those of `generate`."""
        rows, params = self.requests([prompt], **options)
        for responses in self._steps(rows, params, prompt_cache):
            yield from responses

    def _steps(self, rows: list[Completion], *rest: Any) -> Iterator[list[Response]]:
        return Batch(self.target, self.drafter, self.shape, rows, *rest).steps()

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


def make_drafter(name: str, target: Target) -> NoDrafter:
    """The drafter that a name stands for.

    `auto`: the shipped drafter for this model with n-grams mixed in, else n-grams alone. `recurrent`: the shipped
    drafter alone. `ngram`, `none`, or a folder; `+ngram` behind a name mixes n-grams in.
    """
    bare, mixed, _ = name.partition("+ngram")
    if bare in ("none", "ngram"):
        require(not mixed, f"n-grams mix into a drafter with a network, not into {bare!r}")
        return NoDrafter() if bare == "none" else NgramDrafter()
    own = target.identity()
    if bare in ("auto", "recurrent"):
        folder = checkpoint.find_shipped(own, target.quantised)
        if folder is None and bare == "auto":
            return NgramDrafter()
        if folder is None:
            raise ModelNotFound(
                f"no drafter for {target.name} comes with redrafter-mlx: name a drafter folder, or ngram"
            )
    else:
        folder = Path(bare)
    net, made_for = checkpoint.read(folder)
    checkpoint.compare(made_for, own, f"the drafter {folder.name}", target.name)
    target.check_sizes(net.config)
    net.guess_first(TOKENS)
    net.cast(target.dtype)
    ngrams = bare == "auto" or bool(mixed)
    return RecurrentDrafter(net, target.embed, target.output_rows(net.token_ids), ngrams)
