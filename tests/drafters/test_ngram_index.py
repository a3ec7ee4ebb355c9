"""The index on the host finds what the tensor search finds."""

import random

import torch

from redrafter.drafters.ngram_index import NgramIndex
from redrafter.kernels.ngram_match import chain


def test_the_same_chains_as_the_tensor_search():
    draw = random.Random(0)
    seen = set()
    for _ in range(60):
        text = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        index = NgramIndex(text[:1], 2, 5)
        for token in text[1:]:
            index.extend([token])
        tokens, sizes = chain(torch.tensor([[*text, *[0] * 20]]), torch.tensor([len(text)]), 5, 2, 8)
        size = int(sizes[0])
        assert index.chain(8) == (tokens[0].tolist() if size else [], size)
        seen.add(size)
    assert seen == {0, 2, 3, 4, 5}


def test_tokens_may_come_one_by_one_or_together():
    whole = NgramIndex([1, 2, 3, 1, 2, 3, 1], 2, 5)
    grown = NgramIndex([], 2, 5)
    for part in ([1], [2, 3], [], [1, 2, 3, 1]):
        grown.extend(part)
    assert grown.ends == whole.ends
    assert grown.chain(4) == whole.chain(4) == ([2, 3, 1, 2], 4)
