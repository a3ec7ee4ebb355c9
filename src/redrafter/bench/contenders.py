"""The contenders of `redrafter bench run`: engines that answer prompts and report their times and accepted tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from redrafter.bench.specs import REFERENCE as REFERENCE
from redrafter.engine import Engine
from redrafter.engine.exactness import Exactness


@dataclass(frozen=True)
class PromptBatch:
    """Prompts to answer as one batch, with their sampling settings."""

    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class TimedAnswer:
    """One answer with its times. In a batch, `seconds` is the batch's time divided by the number of rows."""

    tokens: list[int]
    seconds: float
    first_seconds: float  # until the first token of the batch
    accepted: list[int]  # drafted tokens accepted in each step after the prefill
    first_tokens: int = 1  # tokens that the prefill gave


class Contender(Protocol):
    """An engine that takes part in a benchmark.

    seeded: uses the same random numbers as plain decoding, so that sampled texts can be compared.
    one_row: cannot answer a batch.
    exactness: what the engine promises about its tokens, see `redrafter.engine.exactness`; None for other engines.
    """

    name: str
    seeded: bool
    one_row: bool

    @property
    def exactness(self) -> Exactness | None: ...

    def answer(self, batch: PromptBatch) -> list[TimedAnswer]: ...


class Ours:
    """A redrafter engine; without a drafter it is plain decoding."""

    seeded, one_row = True, False

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine

    @property
    def exactness(self) -> Exactness | None:
        return self.engine.exactness

    def answer(self, batch: PromptBatch) -> list[TimedAnswer]:
        requests = self.engine.requests(
            batch.prompts, max_new_tokens=batch.max_new_tokens, temperature=batch.temperature, seed=batch.seeds
        )
        _synchronize(self.engine.target.device)
        began, first = time.perf_counter(), 0.0
        tokens: list[list[int]] = [[] for _ in requests]
        accepted: list[list[int]] = [[] for _ in requests]
        for parts in self.engine.run(requests):
            for part in parts:
                tokens[part.row] += part.tokens
                if first:
                    accepted[part.row].append(part.accepted)
            first = first or time.perf_counter() - began
        share = (time.perf_counter() - began) / len(requests)
        return [TimedAnswer(t, share, first, a) for t, a in zip(tokens, accepted, strict=True)]


class Transformers:
    """transformers' `generate`: plain, with prompt lookup, or with an assistant model. One row at a time."""

    seeded, one_row, exactness = False, True, None

    def __init__(self, name: str, model: Any, eos: Sequence[int], **options: Any) -> None:
        self.name, self.model, self.eos, self.options = name, model, list(eos), options

    def answer(self, batch: PromptBatch) -> list[TimedAnswer]:
        return [self._one(p, s, batch) for p, s in zip(batch.prompts, batch.seeds, strict=True)]

    @torch.inference_mode()
    def _one(self, prompt: list[int], seed: int, batch: PromptBatch) -> TimedAnswer:
        ids = torch.tensor([prompt], device=self.model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if batch.temperature > 0:
            sampling = {"do_sample": True, "temperature": batch.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed % 2**63)
        streamer = _Steps()
        _synchronize(self.model.device)
        began = time.perf_counter()
        whole = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=batch.max_new_tokens,
            eos_token_id=self.eos or None,
            pad_token_id=0,
            streamer=streamer,
            **sampling,
            **self.options,
        )
        seconds = time.perf_counter() - began
        tokens = whole[0, len(prompt) :].tolist()
        return TimedAnswer(
            tokens, seconds, streamer.first - began, [n - 1 for n in streamer.gains[1:]], streamer.gains[0]
        )


class _Steps:
    """A transformers streamer that records the tokens of each step and the time of the first."""

    def __init__(self) -> None:
        self.gains: list[int] = []
        self.first, self.prompt = 0.0, True

    def put(self, value: torch.Tensor) -> None:
        if self.prompt:  # the first call passes the prompt
            self.prompt = False
            return
        self.first = self.first or time.perf_counter()
        self.gains.append(value.numel())

    def end(self) -> None:
        """Required by transformers."""


class LlamaCpp:
    """llama.cpp through llama-cpp-python. Its arithmetic differs, so texts are not compared. One row at a time."""

    seeded, one_row, exactness = False, True, None

    def __init__(self, name: str, model: Any, eos: Sequence[int]) -> None:
        self.name, self.model, self.eos = name, model, set(eos)

    def answer(self, batch: PromptBatch) -> list[TimedAnswer]:
        return [self._one(p, s, batch) for p, s in zip(batch.prompts, batch.seeds, strict=True)]

    def _one(self, prompt: list[int], seed: int, batch: PromptBatch) -> TimedAnswer:
        self.model.reset()  # else a repeated prompt would be cached
        self.model.set_seed(seed % 2**31)
        top_k = 0 if batch.temperature > 0 else 1
        began, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        for token in self.model.generate(
            prompt, temp=batch.temperature, top_k=top_k, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            first = first or time.perf_counter() - began
            tokens.append(int(token))
            if token in self.eos or len(tokens) == batch.max_new_tokens:
                break
        return TimedAnswer(tokens, time.perf_counter() - began, first, [0] * (len(tokens) - 1))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
