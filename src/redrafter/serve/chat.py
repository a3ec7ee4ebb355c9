"""Answers of `/v1/chat/completions`."""

from collections.abc import Callable, Sequence

from redrafter.serve.answer import Answer, Content
from redrafter.serve.job import Event, Job
from redrafter.serve.tool_calls import Call, CallParser, Pieces, calls_of, content_of


class ChatAnswer(Answer):
    """`parsers` (one for each answer) find tool calls; None where no tool is offered."""

    prefix, chunk_kind, whole_kind = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(
        self,
        jobs: list[Job],
        model: str,
        text_of: Callable[[int], str],
        parsers: Sequence[CallParser | None],
        *,
        trace: bool = False,
    ) -> None:
        super().__init__(jobs, model, text_of, trace=trace)
        self.parsers = parsers
        self.calls: list[list[Call]] = [[] for _ in jobs]
        self.fresh: list[Pieces] = [[] for _ in jobs]  # what the last event brought

    def take(self, index: int, event: Event) -> None:
        before = self.texts[index]
        super().take(index, event)
        assert event.part is not None
        parser = self.parsers[index]
        if parser is None:
            self.fresh[index] = [event.part.text]
            return
        self.fresh[index] = found = parser.take(event.part.text, final=event.part.finish_reason is not None)
        self.texts[index] = before + content_of(found)
        for piece in calls_of(found):
            if piece.index == len(self.calls[index]):
                self.calls[index].append(Call(piece.index, piece.id, piece.name))
            self.calls[index][piece.index].arguments += piece.arguments
        if self.calls[index] and self.reasons[index] == "stop":
            self.reasons[index] = "tool_calls"

    def opening(self) -> list[Content]:
        """A chat says who speaks."""
        role = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(len(self.jobs))]
        return [self._chunk([choice]) for choice in choices]

    def _streamed(self, index: int, event: Event) -> Content:
        words, calls = content_of(self.fresh[index]), calls_of(self.fresh[index])
        delta: Content = {"content": words} if words else {}
        if calls:
            delta["tool_calls"] = [{"index": call.index} | as_call(call) for call in calls]
        found = self._logprobs(event)
        logprobs = {"content": found, "refusal": None} if found else None
        return {"index": index, "finish_reason": self.reasons[index], "logprobs": logprobs, "delta": delta}

    def _choice(self, i: int) -> Content:
        message: Content = {"role": "assistant", "content": self.texts[i], "refusal": None}
        if self.calls[i]:
            message["content"] = self.texts[i].strip() or None
            message["tool_calls"] = [as_call(call) for call in self.calls[i]]
        choice: Content = {"message": message}
        if self.jobs[i].logprobs is not None:
            choice["logprobs"] = {"content": self.logprobs[i], "refusal": None}
        return choice


def as_call(call: Call) -> Content:
    """In OpenAI's form; a later piece of a streamed call has arguments only."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
