"""What the scheduler tells, in OpenAI's words."""

import secrets
import time
from collections.abc import Callable
from typing import Any

from redrafter.engine.exactness import weakest
from redrafter.serve.job import Event, Job

Content = dict[str, Any]
LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Answer:
    """One request's answers as they grow; `chat` and plain completions differ in a few names."""

    def __init__(
        self, jobs: list[Job], model: str, text_of: Callable[[int], str], *, chat: bool, trace: bool = False
    ) -> None:
        self.jobs, self.chat, self.text_of, self.trace = jobs, chat, text_of, trace
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head: Content = {"id": self.id, "created": int(time.time()), "model": model}
        self.texts = ["" for _ in jobs]
        self.logprobs: list[list[Content]] = [[] for _ in jobs]
        self.reasons: list[str | None] = [None for _ in jobs]

    @property
    def open(self) -> bool:
        return any(reason is None for reason in self.reasons)

    def take(self, index: int, event: Event) -> None:
        assert event.part is not None
        self.texts[index] += event.part.text
        self.logprobs[index] += self._logprobs(event)
        self.reasons[index] = event.part.finish_reason

    def opening(self) -> list[Content]:
        """Chunks before any text: a chat says who speaks."""
        if not self.chat:
            return []
        role = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(len(self.jobs))]
        return [self._chunk([choice]) for choice in choices]

    def chunk(self, index: int, event: Event) -> Content:
        """What a step added to one answer."""
        assert event.part is not None
        choice: Content = {"index": index, "finish_reason": event.part.finish_reason, "logprobs": None}
        if self.chat:
            choice["delta"] = {"content": event.part.text} if event.part.text else {}
        else:
            choice["text"] = event.part.text
        if found := self._logprobs(event):
            choice["logprobs"] = {"content": found} if self.chat else self._legacy(found)
        made = self._chunk([choice])
        if self.trace:
            made["redrafter"] = self._shown(event)
        return made

    def closing(self) -> Content:
        """The chunk that `stream_options.include_usage` asks for."""
        return self._chunk([]) | {"usage": self.usage()}

    def whole(self) -> Content:
        choices = []
        for i, text in enumerate(self.texts):
            found = self.logprobs[i] if self.jobs[i].logprobs is not None else None
            choice: Content = {"index": i, "finish_reason": self.reasons[i], "logprobs": None}
            if found is not None:
                choice["logprobs"] = {"content": found} if self.chat else self._legacy(found)
            choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        return self.head | {"object": kind, "choices": choices, "usage": self.usage()}

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
        return self.head | {"object": "chat.completion.chunk" if self.chat else "text_completion", "choices": choices}

    def _logprobs(self, event: Event) -> list[Content]:
        if event.part is None or event.output is None or event.output.logprobs is None:
            return []
        kept = event.output.logprobs[: len(event.part.tokens)]
        return [self._one(*row[0]) | {"top_logprobs": [self._one(*other) for other in row[1:]]} for row in kept]

    def _one(self, token: int, logprob: float) -> Content:
        text = self.text_of(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode(errors="replace"))}

    def _legacy(self, found: list[Content]) -> Content:
        """As completions had it before there was chat."""
        offsets, at = [], 0
        for row in found:
            offsets.append(at)
            at += len(row["token"])
        return {
            "tokens": [row["token"] for row in found],
            "token_logprobs": [row["logprob"] for row in found],
            "top_logprobs": [{t["token"]: t["logprob"] for t in row["top_logprobs"]} for row in found],
            "text_offset": offsets,
        }

    def _shown(self, event: Event) -> Content:
        """Who wrote each token, and the tree that the step verified."""
        part, written = event.part, event.output
        assert part is not None
        assert written is not None
        stats = part.stats
        shown: Content = {
            "pieces": [{"text": text, "drafted": i < part.accepted} for i, text in enumerate(part.pieces)],
            "steps": stats.steps,
            "tokens": stats.tokens,
            "seconds": round(stats.seconds, 4),
            "first_token_seconds": round(stats.first_token_seconds, 4),
        }
        if written.tree is not None:
            tokens, parents, path = written.tree
            shown["tree"] = {"tokens": [self.text_of(t) for t in tokens], "parents": parents, "path": path}
        return shown
