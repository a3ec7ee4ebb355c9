"""The model that is served, as the API sees it: names, text and token counts, no tensors."""

from collections.abc import Callable
from typing import Any

from redrafter.config import Grammar
from redrafter.engine import Engine
from redrafter.engine.exactness import Promise
from redrafter.errors import ConfigError, PromptTooLong
from redrafter.serve.chat_prompt import ChatPrompts
from redrafter.serve.job import Event, Job
from redrafter.serve.prompts import Prompts
from redrafter.serve.scheduler import Scheduler
from redrafter.serve.schema import ChatAsked, CompletionAsked, TokenizeAsked


class Served:
    """A scheduler and the words around it."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        name: str,
        promise: Promise,
        prompt_limit: int | None = None,
        tool_parser: str | None = None,
    ) -> None:
        self.engine, self.scheduler, self.name, self.promise = engine, scheduler, name, promise
        self.context = scheduler.batch.context
        self.prompt_limit = min(prompt_limit or self.context - 1, self.context - 1)
        self.tokenizer = engine.target.tokenizer
        self.chat = ChatPrompts(engine, tool_parser)
        self.prompts = Prompts(engine, self.chat, name, self.prompt_limit)
        self.texts: dict[int, str] = {}  # of single tokens, as far as they were asked for

    def text_of(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = str(self.tokenizer.decode([token]))
        return self.texts[token]

    def jobs(
        self, asked: ChatAsked | CompletionAsked, listener: Callable[[int, Event], None], owner: str = ""
    ) -> list[Job]:
        """One job for each answer to write; ConfigError and PromptTooLong say what is wrong with the request.

        owner: who asks. A trace shows what was guessed, which may be another client's answer: nothing is recalled for
        it.
        """
        every = self.prompts.read(asked)
        options = self._options(asked) | {"grammar": self._grammar(asked)}
        if isinstance(asked, ChatAsked) and asked.offered:
            options["shown"] = tuple(self.chat.special.values())
        ranked = asked.written > asked.n
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
                        logprobs=0 if ranked and asked.alternatives is None else asked.alternatives,
                        prompt_logprobs=asked.prompt_alternatives,
                        reuses=asked.reuse,
                        owner=owner,
                        remembers=not asked.trace and asked.store is not False,
                    )
                )
        return made

    def tokenize(self, asked: TokenizeAsked) -> dict[str, Any]:
        """vLLM's form of the tokens of a text or of messages."""
        ids = self.prompts.tokenize(asked)
        strings = [self.text_of(token) for token in ids] if asked.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.context, "tokens": ids, "token_strs": strings}

    def tokenizer_info(self) -> dict[str, Any]:
        """vLLM's form, as far as clients use it."""
        names = ("bos_token", "eos_token", "pad_token", "chat_template")
        told = {name: getattr(self.tokenizer, name, None) for name in names}
        return told | {"tokenizer_class": type(self.tokenizer).__name__, "model_max_length": self.context}

    def _options(self, asked: ChatAsked | CompletionAsked) -> dict[str, Any]:
        names = (
            "seed", "stop", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
            "frequency_penalty", "repetition_penalty",
        )  # fmt: skip
        options = {name: getattr(asked, name) for name in names} | {"n": asked.written}
        try:
            options["logit_bias"] = {int(token): value for token, value in asked.logit_bias.items()}
        except ValueError:
            raise ConfigError(f"logit_bias is keyed by token ids, got {next(iter(asked.logit_bias))!r}") from None
        return options

    def _grammar(self, asked: ChatAsked | CompletionAsked) -> Grammar | None:
        """The grammar of the answers. Compiled here, so that an error names the field."""
        calls = self.chat.grammar(asked) if isinstance(asked, ChatAsked) else None
        found = ("tools", calls) if calls is not None else asked.grammar()
        if found is None:
            return None
        name, grammar = found
        try:
            self.engine.grammars.compiled(grammar)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        return grammar

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
        return room if most is None else max(1, most)
