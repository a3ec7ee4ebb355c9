"""Answers of `/v1/completions`."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from redrafter.serve.answer import Answer, Content
from redrafter.serve.job import Event, Job
from redrafter.serve.schema import CompletionAsked


class TextAnswer(Answer):
    """`echoes` (one for each answer) are given before the text; of each prompt's answers the `n` best are given."""

    prefix, chunk_kind, whole_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        asked: CompletionAsked,
        jobs: list[Job],
        model: str,
        text_of: Callable[[int], str],
        echoes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(jobs, model, text_of, trace=asked.trace)
        self.asked = asked
        self.echoes = list(echoes) if echoes is not None else ["" for _ in jobs]
        self.begun = [False for _ in jobs]
        self.offsets = [0 for _ in jobs]  # characters of tokens that were streamed

    def take(self, index: int, event: Event) -> None:
        super().take(index, event)
        if not self.asked.max_tokens:  # one token was written, since a row writes at least one
            self.texts[index], self.logprobs[index], self.reasons[index] = "", [], "length"

    def usage(self) -> Content:
        told = super().usage()
        if not self.asked.max_tokens:
            told |= {"completion_tokens": 0, "total_tokens": told["prompt_tokens"]}
        return told

    def _given(self) -> Sequence[int]:
        """Of the answers to each prompt, the `n` with the highest mean log-probability, the best first."""
        written, n = self.asked.written, self.asked.n
        if written == n:
            return range(len(self.jobs))

        def mean(i: int) -> float:
            return sum(float(row["logprob"]) for row in self.logprobs[i]) / max(1, len(self.logprobs[i]))

        groups = [range(start, start + written) for start in range(0, len(self.jobs), written)]
        return [i for group in groups for i in sorted(group, key=mean, reverse=True)[:n]]

    def _streamed(self, index: int, event: Event) -> Content:
        assert event.part is not None
        silent = not self.asked.max_tokens
        text, found = ("", []) if silent else (event.part.text, self._logprobs(event))
        first, self.begun[index] = not self.begun[index], True
        logprobs = None
        if self.asked.logprobs is not None and (found or first):
            logprobs = self._legacy(index, found, echoed=first)
        text = self.echoes[index] + text if first else text
        return {"index": index, "finish_reason": self.reasons[index], "logprobs": logprobs, "text": text}

    def _choice(self, i: int) -> Content:
        choice: Content = {"text": self.echoes[i] + self.texts[i]}
        if self.asked.logprobs is not None:
            choice["logprobs"] = self._legacy(i, self.logprobs[i], echoed=True)
        return choice

    def _legacy(self, i: int, found: list[Content], echoed: bool) -> Content:
        """Log-probabilities as completions had them before there was chat; nothing precedes a prompt's first token."""
        rows: list[Content] = list(found)
        heard = self.prompt_logprobs[i]
        if echoed and self.asked.echo and heard is not None:
            first = {"token": self.text_of(self.jobs[i].request.prompt[0]), "logprob": None, "top_logprobs": None}
            rows = [first, *self._told(heard), *found]
        lengths = [len(row["token"]) for row in rows]
        *offsets, end = accumulate(lengths, initial=self.offsets[i])
        if self.asked.stream:
            self.offsets[i] = end
        tops = [row["top_logprobs"] for row in rows]
        return {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [None if top is None else {t["token"]: t["logprob"] for t in top} for top in tops],
            "text_offset": offsets,
        }
