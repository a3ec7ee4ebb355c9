"""Tokens to text as they come, and stop strings found in it."""

from collections.abc import Sequence
from typing import Any

LONGEST_WINDOW = 64  # tokens decoded together; no character has as many


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

    def add(self, token: int) -> str:
        """Take a token -> the text that is sure now."""
        self.ids.append(token)
        fresh = self._fresh()
        if (fresh and not fresh.endswith("\ufffd")) or len(self.ids) - self._from > LONGEST_WINDOW:
            self._append(fresh)
        return self._hand_out(0 if self.stopped else self._begun())

    def finish(self) -> str:
        """All that is left."""
        if not self.stopped:
            self._append(self._fresh())
        return self._hand_out(0)

    def _fresh(self) -> str:
        """The text of the tokens that are not in `text` yet. A token's text depends on the tokens before it."""
        before = self._decode(self.ids[self._from : self._read])
        return self._decode(self.ids[self._from :])[len(before) :]

    def _append(self, fresh: str) -> None:
        """Add to the text, up to a stop string."""
        longest = max((len(s) for s in self.stop), default=0)
        search = max(0, len(self.text) - longest)
        self.text += fresh
        self._from, self._read = self._read, len(self.ids)
        found = [at for s in self.stop if (at := self.text.find(s, search)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _hand_out(self, held_back: int) -> str:
        piece = self.text[self._given : len(self.text) - held_back]
        self._given += len(piece)
        return piece

    def _begun(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        sizes = [n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n])]
        return max(sizes, default=0)

    def _decode(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(ids, skip_special_tokens=True))
