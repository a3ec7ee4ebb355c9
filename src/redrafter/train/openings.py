"""Texts to tune with: the target's own, after prompts of many kinds, or after openings it makes up itself."""

from collections.abc import Callable, Sequence

from redrafter.config import SamplingParams
from redrafter.core.noise import fold
from redrafter.engine import Engine
from redrafter.errors import ConfigError
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.row import Request
from redrafter.train.dataset import Texts
from redrafter.train.self_prompts import SelfPrompts, has_template

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
OPENING = 24
"""Tokens of an opening that a model without a chat template makes up."""


def own_texts(
    engine: Engine,
    prompts: Sequence[str] | None,
    *,
    count: int,
    length: int,
    temperature: float = 0.0,
    progress: Callable[[], None] | None = None,
) -> Texts:
    """At most `count` texts of at most `length` new tokens; the same each time."""
    target = engine.target
    every = _prompts(engine, prompts or PROMPTS, count) if prompts or has_template(target) else _made_up(engine, count)
    room = [(ids, min(length, target.max_positions - len(ids))) for ids in every]
    sampling = SamplingParams(temperature=temperature)
    starts = [
        Request(prompt=ids, seed=fold(0, i), max_new_tokens=n, sampling=sampling, eos=engine.eos_tokens())
        for i, (ids, n) in enumerate(room)
        if n > 1
    ]
    told = None if progress is None else lambda _: progress()
    written = write_texts(target, starts, rows=count, progress=told)
    rows = [(s, [*s.prompt, *new]) for s, new in zip(starts, written, strict=True) if len(new) > 1]
    if not rows:
        raise ConfigError(f"{target.name} writes next to nothing after these prompts: give others with --prompts")
    lengths, seeds = [len(s.prompt) for s, _ in rows], [s.seed for s, _ in rows]
    return Texts.of([ids for _, ids in rows], lengths, [temperature] * len(rows), seeds)


def _prompts(engine: Engine, prompts: Sequence[str], count: int) -> list[list[int]]:
    """Spread evenly over all there are; a user's turn where the model knows such."""
    chosen = [prompts[i * len(prompts) // count] for i in range(count)] if count < len(prompts) else prompts
    chat = has_template(engine.target)
    return [engine.encode([{"role": "user", "content": text}] if chat else text) for text in chosen]


def _made_up(engine: Engine, count: int) -> list[list[int]]:
    pieces = SelfPrompts(engine.target, lambda _: [], seed=0, budget=OPENING, rows=count).take(0, count)
    return [piece.tokens for piece in pieces]
