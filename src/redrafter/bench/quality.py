"""Quality of texts against human references: ROUGE-1 of summaries, word error rate of transcripts."""

import re
from collections import Counter
from collections.abc import Sequence


def rouge1(reference: str, text: str) -> float:
    """Return the unigram F1, as rouge-score computes it without stemming.

    >>> rouge1("The cat sat.", "the cat ran away")  # 2 of 3 and 2 of 4
    0.5714285714285714
    """
    wanted, got = (Counter(re.findall(r"[a-z0-9]+", t.lower())) for t in (reference, text))
    common = (wanted & got).total()
    return 2 * common / (wanted.total() + got.total()) if common else 0.0


def normalise(text: str) -> list[str]:
    """Split a text into words: lower case, no punctuation, `mister` abbreviated as Whisper does."""
    kept = "".join(c if c.isalnum() or c in "' " else " " for c in text.lower())
    return ["mr" if word == "mister" else word for word in kept.split()]


def wrong_words(reference: Sequence[str], words: Sequence[str]) -> int:
    """Return the edit distance in words: the numerator of the word error rate.

    >>> wrong_words("a b c".split(), "a x c d".split())
    2
    """
    before = list(range(len(words) + 1))
    for i, wanted in enumerate(reference, start=1):
        now = [i]
        for j, word in enumerate(words, start=1):
            now.append(min(before[j] + 1, now[-1] + 1, before[j - 1] + (wanted != word)))
        before = now
    return before[-1]


def word_error_rate(references: Sequence[str], texts: Sequence[str]) -> float:
    pairs = [(normalise(a), normalise(b)) for a, b in zip(references, texts, strict=True)]
    return sum(wrong_words(a, b) for a, b in pairs) / sum(len(a) for a, _ in pairs)
