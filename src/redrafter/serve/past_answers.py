"""The last answer to each prompt, for whoever asks the same again: a second text to look up n-grams in."""

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from redrafter.drafters.with_ngrams import LONGEST

ENTRY = 400
"""Bytes that an answer takes besides its tokens: the hash that finds it, and places in a dictionary."""
TOKEN = 4
"""Bytes of a token."""


class PastAnswers:
    """Answers in at most `room` bytes of memory; the one least recently written or asked for goes first.

    An answer is found by a hash of its owner and the whole prompt, so that neither takes memory. Answers to other
    prompts gave no more tokens/step (docs/experiments.md). Only the scheduler's thread calls this.

    >>> past = PastAnswers(room=1000)
    >>> past.add("Ada", [1, 2], [7, 8, 9])
    >>> past.text("Ada", [1, 2]), past.text("Bob", [1, 2]), past.text("Ada", [1])
    ([1, 2, 7, 8, 9], [], [])
    """

    def __init__(self, room: int) -> None:
        self.room, self.bytes = room, 0
        self.kept: OrderedDict[bytes, array[int]] = OrderedDict()
        self.secret = secrets.token_bytes(16)  # so that nobody can look for two prompts with one hash

    def text(self, owner: str, prompt: Sequence[int]) -> list[int]:
        """The last answer to this prompt, after as much of the prompt's end as a match may have; empty if none."""
        key = self._key(owner, prompt)
        if key not in self.kept:
            return []
        self.kept.move_to_end(key)
        return [*prompt[-LONGEST:], *self.kept[key]]

    def add(self, owner: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Remember an answer in place of the one before, unless it is only a beginning of that."""
        key, new = self._key(owner, prompt), array("i", answer)
        before = self.kept.pop(key, None)
        if before is not None:
            self.bytes -= size(before)
            new = before if before[: len(new)] == new else new
        self.kept[key] = new
        self.bytes += size(new)
        while self.bytes > self.room:
            self.bytes -= size(self.kept.popitem(last=False)[1])

    def _key(self, owner: str, prompt: Sequence[int]) -> bytes:
        asked = f"{owner}\0".encode() + array("i", prompt).tobytes()
        return hashlib.blake2b(asked, digest_size=16, key=self.secret).digest()


def size(answer: Sequence[int]) -> int:
    """Bytes of memory."""
    return ENTRY + TOKEN * len(answer)
