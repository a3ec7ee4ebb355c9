"""Text as it comes: characters of several tokens, stop strings across tokens."""

import pytest

from redrafter.engine.text import TextWriter


class Bytes:
    """One token per byte, so that one character may take four tokens."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


TEXTS = ["plain", "naïve façade", "雪が降る", "a🙂b", "🙂", "x\ny\n\nz"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_are_never_half_a_character(text):
    writer, pieces = TextWriter(Bytes()), []
    for byte in text.encode():
        writer.add(byte)
        pieces.append(writer.take())
    pieces.append(writer.take(final=True))
    assert "".join(pieces) == text
    assert not any("\ufffd" in p for p in pieces)


def test_tokens_without_text_cost_little():
    class Silent(Bytes):
        decoded = 0

        def decode(self, ids, skip_special_tokens=True):
            self.decoded += len(ids)
            return super().decode([i for i in ids if i])

    tokenizer = Silent()
    writer = TextWriter(tokenizer)
    for token in [*b"before", *[0] * 2000, *b" after"]:
        writer.add(token)
    assert writer.take(final=True) == "before after"
    assert tokenizer.decoded < 2006 * 150


def test_an_unfinished_character_appears_only_at_the_end():
    writer = TextWriter(Bytes())
    for byte in "ab🙂".encode()[:-1]:
        writer.add(byte)
    assert writer.take() == "ab"
    assert writer.take(final=True) == "\ufffd"


@pytest.mark.parametrize("stop", ["END", "🙂", "E", "\n\n"])
def test_stop_string_is_found_at_its_last_token_and_never_shown(stop):
    text = f"some E EN \n 🙈 text {stop} more"
    cut = text.index(stop)
    writer, shown = TextWriter(Bytes(), [stop, "NEVER"]), ""
    for byte in text.encode():
        if writer.add(byte):
            break
        shown += writer.take()
        assert text.startswith(shown)
    assert len(writer.ids) == len(text[:cut].encode()) + len(stop.encode())
    assert shown + writer.take(final=True) == text[:cut]


def test_what_only_looked_like_a_stop_string_is_given_out():
    writer = TextWriter(Bytes(), ["END"])
    shown = ""
    for byte in b"EN EEN":
        assert not writer.add(byte)
        shown += writer.take()
    assert shown == "EN E"
    assert writer.take(final=True) == "EN"
