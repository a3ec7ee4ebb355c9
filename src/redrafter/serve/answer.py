"""One request's answers as they grow: what `/v1/chat/completions` and `/v1/completions` have in common."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from redrafter.engine.exactness import weakest
from redrafter.runtime.row import Logprobs
from redrafter.serve.job import Event, Job

Content = dict[str, Any]
LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Answer(ABC):
    """Takes the scheduler's events and gives OpenAI's JSON, whole or in chunks."""

    prefix: ClassVar[str]
    """What ids begin with."""
    chunk_kind: ClassVar[str]
    """The `object` of a streamed chunk."""
    whole_kind: ClassVar[str]
    ending: ClassVar[str] = "data: [DONE]\n\n"
    """The last words of a stream."""

    def __init__(self, jobs: list[Job], model: str, text_of: Callable[[int], str], *, trace: bool = False) -> None:
        self.jobs, self.text_of, self.trace = jobs, text_of, trace
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.head: Content = {"id": self.id, "created": int(time.time()), "model": model}
        self.texts = ["" for _ in jobs]
        self.logprobs: list[list[Content]] = [[] for _ in jobs]
        self.prompt_logprobs: list[Logprobs | None] = [None for _ in jobs]
        self.reasons: list[str | None] = [None for _ in jobs]

    @property
    def open(self) -> bool:
        return any(reason is None for reason in self.reasons)

    def take(self, index: int, event: Event) -> None:
        assert event.part is not None
        assert event.output is not None
        self.texts[index] += event.part.text
        self.logprobs[index] += self._logprobs(event)
        self.reasons[index] = event.part.finish_reason
        if event.output.prompt_logprobs is not None:
            self.prompt_logprobs[index] = event.output.prompt_logprobs

    def opening(self) -> list[Content]:
        """Chunks before any text."""
        return []

    def chunks(self, index: int, event: Event) -> list[Content]:
        """What a step added to one answer."""
        made = self._chunk([self._streamed(index, event)])
        if self.trace:
            made["redrafter"] = self._shown(event)
        return [made]

    def closing(self, usage: bool) -> list[Content]:
        """Chunks after all text; with usage where `stream_options.include_usage` asks for it."""
        return [self._chunk([]) | {"usage": self.usage()}] if usage else []

    def sent(self, content: Content) -> str:
        """A chunk as a server-sent event."""
        return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"

    def whole(self) -> Content:
        choices = []
        for index, i in enumerate(self._given()):
            choice: Content = {"index": index, "finish_reason": self.reasons[i], "logprobs": None} | self._choice(i)
            if self.jobs[i].prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._of_prompt(i)
            choices.append(choice)
        return self.head | {"object": self.whole_kind, "choices": choices, "usage": self.usage()}

    def _given(self) -> Sequence[int]:
        """The answers to give, of all that were written."""
        return range(len(self.jobs))

    @abstractmethod
    def _streamed(self, index: int, event: Event) -> Content:
        """The choice of a streamed chunk."""

    @abstractmethod
    def _choice(self, i: int) -> Content:
        """What is particular about a finished choice."""

    def usage(self) -> Content:
        """Tokens as OpenAI counts them, and how they were written."""
        stats = [job.writer.stats for job in self.jobs]
        prompt = sum(len(ids) for ids in {id(j.request.prompt): j.request.prompt for j in self.jobs}.values())
        tokens, steps = sum(s.tokens for s in stats), sum(s.steps for s in stats)
        accepted, nodes = sum(s.accepted for s in stats), sum(s.nodes for s in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": min(prompt, sum(job.reused for job in self.jobs))},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": nodes - accepted,
            },
            "speculative": {
                "steps": steps,
                "tokens_per_step": round((tokens - len(stats)) / steps, 4) if steps else 1.0,
                "accepted_tokens": accepted,
                "drafted_nodes": nodes,
                "lossless": all(s.lossless for s in stats),
                "exactness": weakest(s.exactness for s in stats),
            },
        }

    def _chunk(self, choices: list[Content]) -> Content:
        return self.head | {"object": self.chunk_kind, "choices": choices}

    def _logprobs(self, event: Event) -> list[Content]:
        if event.part is None or event.output is None or event.output.logprobs is None:
            return []
        return self._told(event.output.logprobs[: len(event.part.tokens)])

    def _told(self, rows: Logprobs) -> list[Content]:
        return [self._one(*row[0]) | {"top_logprobs": [self._one(*other) for other in row[1:]]} for row in rows]

    def _one(self, token: int, logprob: float) -> Content:
        text = self.text_of(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode(errors="replace"))}

    def _of_prompt(self, i: int) -> list[Content | None]:
        """vLLM's form: nothing for the first token, then by token id, the prompt's own token first."""
        told: list[Content | None] = [None]
        for own, *best in self.prompt_logprobs[i] or ():
            ranks = {token: rank for rank, (token, _) in enumerate(best, start=1)}
            told.append(
                {
                    str(token): {
                        "logprob": max(logprob, LEAST),
                        "rank": ranks.get(token),
                        "decoded_token": self.text_of(token),
                    }
                    for token, logprob in (own, *best)
                }
            )
        return told

    def _shown(self, event: Event) -> Content:
        """Who wrote each token, the tree that the step verified, and how many guesses it was expected to keep."""
        part, written = event.part, event.output
        assert part is not None
        assert written is not None
        stats = part.stats
        shown: Content = {
            "pieces": [{"text": text, "drafted": i < part.accepted} for i, text in enumerate(part.pieces)],
            "steps": stats.steps,
            "tokens": stats.tokens,
            "seconds": round(event.seconds, 4),
            "first_token_seconds": round(stats.first_token_seconds, 4),
        }
        if written.tree is not None:
            tokens, parents, path = written.tree
            shown["tree"] = {"tokens": [self.text_of(t) for t in tokens], "parents": parents, "path": path}
        if written.expected:
            shown["expected"] = round(written.expected, 3)
        return shown
