"""The rule `seeded`: the accepted path is the walk along the target's own choices."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter.core.rules.seeded import accept_seeded
from tests.core.rules.trees import V, random_tree


@given(st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_seeded_is_the_walk_in_words(seed):
    """Start at the root; while the target's choice has a child, go there."""
    tree, scores = random_tree(seed)
    noise = torch.randn(3, tree.length + 1, V, generator=torch.Generator().manual_seed(seed))
    by_depth = noise.gather(1, tree.depths[:, :, None].expand(-1, -1, V))
    got = accept_seeded((scores + by_depth).argmax(-1), tree)
    for row in range(3):
        node, tokens, path = 0, [], [0]
        while True:
            choice = int((scores[row, node] + noise[row, int(tree.depths[row, node])]).argmax())
            tokens.append(choice)
            children = [
                n
                for n in range(1, tree.nodes + 1)
                if bool(tree.valid[row, n]) and int(tree.parents[row, n]) == node and int(tree.tokens[row, n]) == choice
            ]
            if not children:
                break
            node = children[0]
            path.append(node)
        assert int(got.count[row]) == len(tokens)
        assert got.tokens[row, : len(tokens)].tolist() == tokens
        assert got.path[row, : len(path)].tolist() == path
