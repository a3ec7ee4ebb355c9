"""How good a text is beside what people wrote: ROUGE-1 of summaries, word error rate of transcripts."""

import re
from collections import Counter
from collections.abc import Sequence


def rouge1(reference: str, text: str) -> float:
    """F1 of the words in common, as rouge-score counts them without stemming.

    >>> rouge1("The cat sat.", "the cat ran away")  # 2 of 3 and 2 of 4
    0.5714285714285714
    """
    wanted, got = (Counter(re.findall(r"[a-z0-9]+", t.lower())) for t in (reference, text))
    common = (wanted & got).total()
    return 2 * common / (wanted.total() + got.total()) if common else 0.0


def spoken(text: str) -> list[str]:
    """Words as they are heard: lower case, no punctuation, `mister` as Whisper writes it."""
    kept = "".join(c if c.isalnum() or c in "' " else " " for c in text.lower())
    return ["mr" if word == "mister" else word for word in kept.split()]


def wrong_words(reference: Sequence[str], words: Sequence[str]) -> int:
    """Fewest words to change, drop or add (jiwer's numerator).

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
    pairs = [(spoken(a), spoken(b)) for a, b in zip(references, texts, strict=True)]
    return sum(wrong_words(a, b) for a, b in pairs) / sum(len(a) for a, _ in pairs)
