"""The last answer to each prompt, for whoever asks the same again: a second text to look up n-grams in."""

from collections import OrderedDict
from collections.abc import Sequence

from redrafter.drafters.with_ngrams import LONGEST

Key = tuple[str, tuple[int, ...]]
"""Who asked, and the prompt."""


class PastAnswers:
    """Prompts and answers of at most `room` tokens, in memory; the one least recently written or asked for goes first.

    An answer is found by the owner's own prompts alone, and by the whole prompt. Answers to other prompts gave no more
    tokens/step (docs/experiments.md). Only the scheduler's thread calls this.

    >>> past = PastAnswers(room=8)
    >>> past.add("Ada", [1, 2], [7, 8, 9])
    >>> past.text("Ada", [1, 2]), past.text("Bob", [1, 2]), past.text("Ada", [1])
    ([1, 2, 7, 8, 9], [], [])
    """

    def __init__(self, room: int) -> None:
        self.room, self.tokens = room, 0
        self.kept: OrderedDict[Key, list[int]] = OrderedDict()

    def text(self, owner: str, prompt: Sequence[int]) -> list[int]:
        """The last answer to this prompt, after as much of the prompt's end as a match may have; empty if none."""
        key = (owner, tuple(prompt))
        if key not in self.kept:
            return []
        self.kept.move_to_end(key)
        return [*prompt[-LONGEST:], *self.kept[key]]

    def add(self, owner: str, prompt: Sequence[int], answer: list[int]) -> None:
        """Remember an answer in place of the one before, unless it is only a beginning of that."""
        key = (owner, tuple(prompt))
        before = self.kept.pop(key, None)
        if before is not None:
            self.tokens -= len(prompt) + len(before)
            answer = before if before[: len(answer)] == answer else answer
        self.kept[key] = answer
        self.tokens += len(prompt) + len(answer)
        while self.tokens > self.room:
            (_, oldest), gone = self.kept.popitem(last=False)
            self.tokens -= len(oldest) + len(gone)
