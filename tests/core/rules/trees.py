"""Random packed trees over a small vocabulary."""

import torch

from redrafter.core.tree import pack_beam

V = 4


def random_tree(seed: int, batch: int = 3, width: int = 4, length: int = 3):
    generator = torch.Generator().manual_seed(seed)
    beam = torch.randint(V, (batch, width, length), generator=generator)
    tree, _ = pack_beam(beam, torch.zeros(batch, dtype=torch.long))
    scores = torch.randn(*tree.tokens.shape, V, generator=generator)
    return tree, scores
