"""The model that is served, as the API sees it: names, text and token counts, no tensors."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from redrafter.engine import Engine
from redrafter.engine.exactness import Promise
from redrafter.errors import ConfigError, PromptTooLong
from redrafter.serve.job import Event, Job
from redrafter.serve.scheduler import Scheduler
from redrafter.serve.schema import Asked, ChatAsked, CompletionAsked


class Served:
    """A scheduler and the words around it."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, name: str, promise: Promise, prompt_limit: int | None = None
    ) -> None:
        self.engine, self.scheduler, self.name, self.promise = engine, scheduler, name, promise
        self.context = scheduler.batch.context
        self.prompt_limit = min(prompt_limit or self.context - 1, self.context - 1)
        self.tokenizer = engine.target.tokenizer
        self.lock = threading.Lock()  # a tokenizer is one at a time's

    def text_of(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def jobs(self, asked: ChatAsked | CompletionAsked, listener: Callable[[int, Event], None]) -> list[Job]:
        """One job for each answer asked for; ConfigError and PromptTooLong say what is wrong with it."""
        with self.lock:
            every = [self._ids(p) for p in self._prompts(asked)]
        options = self._options(asked)
        made: list[Job] = []
        for ids in every:
            budget = self._budget(len(ids), asked.most)
            for request in self.engine.requests([ids], max_new_tokens=budget, **options):
                index = len(made)
                made.append(
                    Job(
                        request,
                        lambda event, index=index: listener(index, event),  # type: ignore[misc]
                        tokenizer=self.tokenizer,
                        rule=self.engine.rule_config,
                        promise=self.promise,
                        drafts=asked.speculative,
                        logprobs=asked.alternatives,
                        reuses=asked.reuse,
                    )
                )
        return made

    def _prompts(self, asked: ChatAsked | CompletionAsked) -> Sequence[Any]:
        if isinstance(asked, CompletionAsked):
            return asked.prompts
        roles = {"developer": "system"}
        return [[{"role": roles.get(m.role, m.role), "content": m.text} for m in asked.messages]]

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return list(prompt)
        try:
            return self.engine.encode(prompt)
        except ConfigError:
            raise
        except Exception as error:  # whatever a tokenizer or a chat template raises about them
            what = "prompt is" if isinstance(prompt, str) else "messages are"
            raise ConfigError(f"the {what} nothing that {self.name} can read: {error}") from error

    def _options(self, asked: Asked) -> dict[str, Any]:
        names = (
            "n", "seed", "stop", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty",
        )  # fmt: skip
        options = {name: getattr(asked, name) for name in names}
        try:
            options["logit_bias"] = {int(token): value for token, value in asked.logit_bias.items()}
        except ValueError:
            raise ConfigError(f"logit_bias is keyed by token ids, got {next(iter(asked.logit_bias))!r}") from None
        return options

    def _budget(self, prompt: int, most: int | None) -> int:
        """New tokens; a number that was asked for must fit."""
        if prompt > self.prompt_limit:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens and this server takes at most {self.prompt_limit}: shorten it"
            )
        room = self.context - prompt
        if most is not None and most > room:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens and max_tokens is {most}: together more than this server's context of "
                f"{self.context}"
            )
        return room if most is None else most
