"""Answers of `/v1/chat/completions`."""

from redrafter.serve.answer import Answer, Content
from redrafter.serve.job import Event


class ChatAnswer(Answer):
    prefix, chunk_kind, whole_kind = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def opening(self) -> list[Content]:
        """A chat says who speaks."""
        role = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": role, "logprobs": None, "finish_reason": None} for i in range(len(self.jobs))]
        return [self._chunk([choice]) for choice in choices]

    def _streamed(self, index: int, event: Event) -> Content:
        assert event.part is not None
        delta = {"content": event.part.text} if event.part.text else {}
        found = self._logprobs(event)
        logprobs = {"content": found, "refusal": None} if found else None
        return {"index": index, "finish_reason": event.part.finish_reason, "logprobs": logprobs, "delta": delta}

    def _choice(self, i: int) -> Content:
        choice: Content = {"message": {"role": "assistant", "content": self.texts[i], "refusal": None}}
        if self.jobs[i].logprobs is not None:
            choice["logprobs"] = {"content": self.logprobs[i], "refusal": None}
        return choice
