"""Who competes: whatever turns prompts into answers and says how it went."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from redrafter.bench.specs import REFERENCE as REFERENCE
from redrafter.engine import Engine


@dataclass(frozen=True)
class Task:
    """Prompts to answer at once, and how."""

    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """One answer. In a batch, `seconds` is this row's share of the time that all rows took."""

    tokens: list[int]
    seconds: float
    first_seconds: float  # until the first token, the batch's whole time
    accepted: list[int]  # guesses kept in each step after the prompt's
    first_tokens: int = 1  # tokens that the prompt's own pass gave


class Contender(Protocol):
    """`seeded`: whether it draws the same numbers as plain decoding, so that sampled texts can be compared too."""

    name: str
    seeded: bool
    one_row: bool

    def answer(self, task: Task) -> list[Answer]: ...


class Ours:
    """An engine of ours; plain decoding is the one without a drafter."""

    seeded, one_row = True, False

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine

    def answer(self, task: Task) -> list[Answer]:
        requests = self.engine.requests(
            task.prompts, max_new_tokens=task.max_new_tokens, temperature=task.temperature, seed=task.seeds
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
        return [Answer(t, share, first, a) for t, a in zip(tokens, accepted, strict=True)]


class Transformers:
    """transformers' own generate: plain, with prompt lookup, or assisted by a smaller model. One row at a time."""

    seeded, one_row = False, True

    def __init__(self, name: str, model: Any, eos: Sequence[int], **options: Any) -> None:
        self.name, self.model, self.eos, self.options = name, model, list(eos), options

    def answer(self, task: Task) -> list[Answer]:
        return [self._one(p, s, task) for p, s in zip(task.prompts, task.seeds, strict=True)]

    @torch.inference_mode()
    def _one(self, prompt: list[int], seed: int, task: Task) -> Answer:
        ids = torch.tensor([prompt], device=self.model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if task.temperature > 0:
            sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed % 2**63)
        heard = _Steps()
        _synchronize(self.model.device)
        began = time.perf_counter()
        whole = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=task.max_new_tokens,
            eos_token_id=self.eos or None,
            pad_token_id=0,
            streamer=heard,
            **sampling,
            **self.options,
        )
        seconds = time.perf_counter() - began
        tokens = whole[0, len(prompt) :].tolist()
        return Answer(tokens, seconds, heard.first - began, [n - 1 for n in heard.gains[1:]], heard.gains[0])


class _Steps:
    """A streamer of transformers: how many tokens came at once, and when the first did."""

    def __init__(self) -> None:
        self.gains: list[int] = []
        self.first, self.prompt = 0.0, True

    def put(self, value: torch.Tensor) -> None:
        if self.prompt:  # what it is told first is the prompt
            self.prompt = False
            return
        self.first = self.first or time.perf_counter()
        self.gains.append(value.numel())

    def end(self) -> None:
        """Nothing is kept back."""


class LlamaCpp:
    """llama.cpp through llama-cpp-python, with its own arithmetic: texts are not compared. One row at a time."""

    seeded, one_row = False, True

    def __init__(self, name: str, model: Any, eos: Sequence[int]) -> None:
        self.name, self.model, self.eos = name, model, set(eos)

    def answer(self, task: Task) -> list[Answer]:
        return [self._one(p, s, task) for p, s in zip(task.prompts, task.seeds, strict=True)]

    def _one(self, prompt: list[int], seed: int, task: Task) -> Answer:
        self.model.reset()  # or a prompt seen before would cost nothing
        self.model.set_seed(seed % 2**31)
        top_k = 0 if task.temperature > 0 else 1
        began, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        for token in self.model.generate(
            prompt, temp=task.temperature, top_k=top_k, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            first = first or time.perf_counter() - began
            tokens.append(int(token))
            if token in self.eos or len(tokens) == task.max_new_tokens:
                break
        return Answer(tokens, time.perf_counter() - began, first, [0] * (len(tokens) - 1))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
