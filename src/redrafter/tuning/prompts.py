"""Texts to tune with. The target writes them itself, after our prompts, the user's prompts, or random openings."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from redrafter.config import SamplingParams, Shape
from redrafter.core.noise import fold
from redrafter.core.step import Drafter
from redrafter.planning.steps import AnyPlanner
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.row import Request
from redrafter.targets import Target
from redrafter.targets.tokenizer import first_token, has_chat_template

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a Python function that tells whether a string is a palindrome, with a docstring.",
    "A train leaves at 14:10 and arrives at 17:45. How long does the journey take? Show your steps.",
    "Write a short letter to a landlord about a heating that does not work.",
    "Translate into French: The lighthouse keeper climbed the stairs every evening and lit the lamp.",
    "List the planets of the solar system with one fact about each.",
    "Correct the spelling: Their are severel reasons why peple like to live neer the see.",
    "Tell a story about a fox who learns to count.",
    "Summarise in two sentences: Photosynthesis is the process by which plants turn light, water and carbon dioxide "
    "into sugar and oxygen. It happens in the leaves, in small bodies called chloroplasts, and feeds nearly all life.",
    "What are the advantages and disadvantages of working from home?",
    "Give the name, age and city as JSON: My name is Ada, I am thirty-six and I live in London.",
    "How do I cook rice so that it does not stick?",
    "You are a pirate. Describe your ship to a new member of the crew.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "Write a poem of eight lines about the first snow.",
    "Who wrote Don Quixote, and what is it about?",
)
OPENING_TOKENS = 24
"""Length of a random opening, for a model without a chat template."""
OPENING_SEED = fold(0, -1)
"""Openings and the texts after them must not share their sampling noise."""


@runtime_checkable
class TunableEngine(Protocol):
    """The part of `redrafter.Engine` that tuning needs."""

    @property
    def target(self) -> Target: ...

    @property
    def drafter(self) -> Drafter: ...

    @property
    def runtime(self) -> str: ...

    @property
    def shapes(self) -> list[Shape]: ...

    planner: AnyPlanner | None

    def requests(self, prompts: Sequence[Any], **options: Any) -> list[Any]: ...

    def run(self, requests: Sequence[Any], *, rows: int) -> Iterator[Any]: ...

    def encode(self, prompt: Any) -> list[int]: ...

    def eos_tokens(self) -> tuple[int, ...]: ...


def openings_of(engine: TunableEngine, prompts: Sequence[str] | None, count: int) -> list[list[int]]:
    """At most so many beginnings of texts: these prompts or our own, or what a model without a chat template writes."""
    if prompts or has_chat_template(engine.target):
        return _encode_prompts(engine, prompts or PROMPTS, count)
    return _random_openings(engine, count)


def _encode_prompts(engine: TunableEngine, prompts: Sequence[str], count: int) -> list[list[int]]:
    """`count` prompts spread evenly over all of them, through the chat template if the model has one."""
    chosen = [prompts[i * len(prompts) // count] for i in range(count)] if count < len(prompts) else prompts
    chat = has_chat_template(engine.target)
    return [engine.encode([{"role": "user", "content": text}] if chat else text) for text in chosen]


def _random_openings(engine: TunableEngine, count: int) -> list[list[int]]:
    """Beginnings of texts, sampled from the target at temperature 1."""
    target = engine.target
    seeds = [fold(OPENING_SEED, i) for i in range(count)]
    budget = max(1, min(OPENING_TOKENS, target.max_positions - 1))
    sampling, eos = SamplingParams(temperature=1.0), engine.eos_tokens()
    starts = [
        Request(prompt=[first_token(target, seed)], seed=seed, max_new_tokens=budget, sampling=sampling, eos=eos)
        for seed in seeds
    ]
    written = write_texts(target, starts, rows=count)
    return [[*start.prompt, *new] for start, new in zip(starts, written, strict=True)]
