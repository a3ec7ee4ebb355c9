"""Tokens to text as they come, and stop strings found in it."""

from collections.abc import Sequence
from typing import Any

LONGEST_WINDOW = 64
"""Tokens decoded together; no character has as many."""


class TextWriter:
    """Holds back bytes of an unfinished character and what may become a stop string.

    Tokens are taken one by one, so what is found does not depend on how many came in a step.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, list(stop)
        self.ids: list[int] = []
        self.text = ""  # decided text, stop string cut off
        self.stopped = False
        self._given = 0  # characters handed out
        self._from, self._read = 0, 0  # window of ids decoded together, and how far it is in `text`

    def add(self, token: int) -> bool:
        """Take a token; True if a stop string is complete with it."""
        self.ids.append(token)
        if self.tokenizer is None:
            return False
        known = self._decode(self.ids[self._from : self._read])
        now = self._decode(self.ids[self._from :])
        if len(now) > len(known) and not now.endswith("\ufffd"):
            self.text += now[len(known) :]
            self._from, self._read = self._read, len(self.ids)
        elif len(self.ids) - self._from > LONGEST_WINDOW:  # tokens without text: do not decode them for ever
            self._from, self._read = self._read, len(self.ids)
        fresh = len(now) - len(known)
        found = [self.text.find(s, max(0, len(self.text) - fresh - len(s))) for s in self.stop]
        if any(at >= 0 for at in found):
            self.text = self.text[: min(at for at in found if at >= 0)]
            self.stopped = True
        return self.stopped

    def take(self, final: bool = False) -> str:
        """Text not yet handed out; all that is left when `final`."""
        if final and not self.stopped and self.tokenizer is not None:
            known = self._decode(self.ids[self._from : self._read])
            self.text += self._decode(self.ids[self._from :])[len(known) :]
            self._from = self._read = len(self.ids)
        end = len(self.text) if final or self.stopped else len(self.text) - self._held_back()
        piece = self.text[self._given : max(end, self._given)]
        self._given = max(end, self._given)
        return piece

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self.stop), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-size:]) for s in self.stop):
                return size
        return 0

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""
