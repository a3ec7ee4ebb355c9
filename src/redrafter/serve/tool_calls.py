"""Finds tool calls in a text as it grows.

Each family of models writes calls in a form of its own. The arguments of a call are passed on as the model writes
them, so a stream of a call arrives piece by piece. A whole text is parsed by the same code.
"""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

FormName = Literal["hermes", "llama3", "mistral", "json"]


@dataclass(frozen=True)
class Form:
    """How a family of models writes calls."""

    opens: str | None
    """Stands before calls; None: the text begins with a call or has none."""
    closes: str | None = None
    """Stands after each call."""
    key: str = "arguments"
    """What the family calls the arguments."""
    bare: bool = False
    """A text that begins with a call needs no opening."""
    named: bool = False
    """A call may be a name followed by its arguments."""
    id_length: int = 24


FORMS: dict[FormName, Form] = {
    "hermes": Form("<tool_call>", "</tool_call>"),  # Qwen 2.5 and 3 as well
    "llama3": Form("<|python_tag|>", key="parameters", bare=True),
    "mistral": Form("[TOOL_CALLS]", named=True, id_length=9),  # its chat template refuses other lengths
    "json": Form(None, bare=True),
}


@dataclass
class Call:
    """A call, or the piece of one that is new."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Pieces = list[str | Call]
"""What is new in a text, in its order: words for the reader, and pieces of calls."""


def content_of(pieces: Pieces) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


def calls_of(pieces: Pieces) -> list[Call]:
    return [piece for piece in pieces if isinstance(piece, Call)]


HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The usual beginning of a call in JSON, up to its arguments."""
NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
"""Mistral's newer form: a name and its arguments."""
NAME_BEGUN = re.compile(r"[\w.-]+(?:\[[\w\[\]]*)?")
SEPARATORS = " \t\r\n,;[]"


class CallParser:
    """Takes a text piece by piece. `names` are the tools there are; at most `most` calls are passed on."""

    def __init__(self, form: Form, names: Collection[str], most: int | None = None) -> None:
        self.form, self.names, self.most = form, names, most
        self.text = ""  # not yet understood
        self.state: Literal["start", "content", "calls", "arguments", "closing"] = "start" if form.bare else "content"
        self.found: Pieces = []
        self.final = False
        self.count = 0
        self.depth, self.quoted, self.escaped = 0, False, False  # inside the arguments
        self.wrapped = False  # the arguments are inside an object, whose end is still to come

    def take(self, text: str, final: bool = False) -> Pieces:
        """What the new text brings; all that is left if it is the `final` piece."""
        self.text += text
        self.found, self.final = [], final
        steps = {
            "start": self._start,
            "content": self._content,
            "calls": self._calls,
            "arguments": self._arguments,
            "closing": self._closing,
        }
        while self.text and steps[self.state]():
            pass
        return self.found

    def _start(self) -> bool:
        """A text that begins with a brace may be a call."""
        first = self.text.lstrip()[:1]
        if not first and not self.final:
            return False
        self.state = "calls" if first == "{" else "content"
        return True

    def _content(self) -> bool:
        opens = self.form.opens
        before, marker, after = self.text.partition(opens) if opens else (self.text, "", "")
        if marker:
            self.state, self.text = "calls", after
        else:
            held = 0 if self.final or opens is None else begun(before, opens)
            self.text = before[len(before) - held :]
            before = before[: len(before) - held]
        self._say(before)
        return bool(marker)

    def _say(self, words: str) -> None:
        """Pass on words that are no call."""
        if self.found and isinstance(self.found[-1], str):
            self.found[-1] += words
        elif words:
            self.found.append(words)

    def _calls(self) -> bool:
        """Between calls: the next one, the end of this one, or words again."""
        opens, closes, rest = self.form.opens, self.form.closes, self.text.lstrip()
        if opens and rest.startswith(opens):  # some models write the marker before each call
            self.text = rest[len(opens) :]
            return True
        if opens and rest and opens.startswith(rest) and not self.final:
            return False
        rest = rest.lstrip(SEPARATORS)
        if closes and rest.startswith(closes):
            self.text, self.state = rest[len(closes) :], "content"
            return True
        if not rest or (closes and closes.startswith(rest) and not self.final):
            self.text = self.text if self.form.bare and not self.count else rest
            return False
        if rest[0] == "{":
            return self._object(rest)
        if self.form.named and (named := NAMED.match(rest)):
            self._begin(named[1], rest[named.end() :], wrapped=False)
            return True
        if self.form.named and not self.final and NAME_BEGUN.fullmatch(rest):
            return False
        self.state = "content"
        return True

    def _object(self, rest: str) -> bool:
        """A call as a JSON object, `rest` from its brace on."""
        if head := HEAD.match(rest):
            try:
                name = json.loads(head[1])
            except ValueError:  # it looks like a call and is no JSON
                self.state = "content"
                return True
            if self._known(name):
                self._begin(name, rest[head.end() :], wrapped=True)
                return True
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
            given = value.get("arguments", value.get("parameters", {}))
            # Escapes, since JSON may hold half a surrogate pair, which no answer can.
            arguments = given.encode(errors="replace").decode() if isinstance(given, str) else json.dumps(given)
        except (ValueError, RecursionError):
            if self.final:
                self.state = "content"
            return self.final
        name = value.get("name")
        if not isinstance(name, str) or not self._known(name):
            self._say(rest[:end])
            self.state, self.text = "content", rest[end:]
            return True
        self._begin(name, rest[end:], wrapped=False)
        self._tell(arguments)
        self.state = "calls"
        return True

    def _known(self, name: str) -> bool:
        """After a marker every name that can be shown is a call's, and the client says what is wrong with it."""
        return name in self.names or (not self.form.bare and name.isprintable())

    def _begin(self, name: str, rest: str, wrapped: bool) -> None:
        if self.most is None or self.count < self.most:
            identity = secrets.token_hex(12)[: self.form.id_length]
            identity = identity if self.form.id_length < 24 else f"call_{identity}"
            self.found.append(Call(self.count, identity, name))
        self.count += 1
        self.text, self.state, self.wrapped = rest, "arguments", wrapped
        self.depth, self.quoted, self.escaped = 0, False, False

    def _tell(self, arguments: str) -> None:
        """Pass on a piece of the last call's arguments."""
        index = self.count - 1
        if self.most is not None and index >= self.most:
            return
        last = self.found[-1] if self.found else None
        if isinstance(last, Call) and last.index == index:
            last.arguments += arguments
        else:
            self.found.append(Call(index, arguments=arguments))

    def _arguments(self) -> bool:
        """Up to the brace that ends the arguments."""
        for at, c in enumerate(self.text):
            if self.quoted:
                self.escaped, self.quoted = c == "\\" and not self.escaped, self.escaped or c != '"'
            elif c == '"':
                self.quoted = True
            elif c in "{[":
                self.depth += 1
            elif c in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self._tell(self.text[: at + 1])
                    self.text, self.state = self.text[at + 1 :], "closing" if self.wrapped else "calls"
                    return True
        self._tell(self.text)
        self.text = ""
        return False

    def _closing(self) -> bool:
        """Up to the brace that ends the call; what else the object holds is of no use."""
        _, brace, after = self.text.partition("}")
        self.text = after
        if brace:
            self.state = "calls"
        return bool(brace)


def begun(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of the marker.

    >>> begun("so <tool", "<tool_call>"), begun("so", "<tool_call>")
    (5, 0)
    """
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
