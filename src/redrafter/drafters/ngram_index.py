"""The n-grams of one text on the host: the same matches as kernels/ngram_match, without a tensor.

Where the host knows the text, a look-up takes microseconds. So a step on a CPU can find a copied chain before the step
decides whether a network is worth running.
"""

from collections.abc import Sequence


class NgramIndex:
    """A text that grows, and where each of its n-grams of the shortest size ended before.

    >>> index = NgramIndex([7, 8, 9, 5, 7, 8], shortest=2, longest=5)
    >>> index.chain(6)  # 9 5 followed 7 8, then the text ends: it repeats
    ([9, 5, 7, 8, 9, 5], 2)
    """

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places of the token after each occurrence
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        start, n = len(self.tokens), self.shortest
        self.tokens += tokens
        for end in range(max(start + 1, n), len(self.tokens) + 1):
            self.ends.setdefault(tuple(self.tokens[end - n : end]), []).append(end)

    def chain(self, length: int) -> tuple[list[int], int]:
        """What followed the longest, then most recent, match of the text's end, and the tokens that matched.

        If the text ends before the chain does, the chain repeats. Without a match: no tokens and 0.
        """
        text, size = self.tokens, len(self.tokens)
        best, start = 0, 0
        for end in reversed(self.ends.get(tuple(text[-self.shortest :]), [])[:-1]):  # the last is the text's own end
            run = self.shortest
            while run < self.longest and run < end and text[end - 1 - run] == text[size - 1 - run]:
                run += 1
            if run > best:
                best, start = run, end
                if run == self.longest:
                    break
        if not best:
            return [], 0
        return [text[start + i % (size - start)] for i in range(length)], best
