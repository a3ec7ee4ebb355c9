"""Speculative decoding from end to end, on `redrafter.core` alone, with a toy model. Run: python examples/speculate.py

The model is one attention layer with random weights: to write a letter, it looks at all letters before, most at the
newest ones. The drafter looks only at the last letter. It guesses a tree of continuations; one pass of the model checks
the whole tree; the letters that the model would have written anyway are kept. So the text is the model's own.
"""

import torch
from torch import Tensor

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.cache import KVCache, slot_positions, tree_visibility
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.tree import Tree, root_tree

LETTERS = "abcdefghijklmnopqrstuvwxyz "
WIDTH, LENGTH, SLOTS = 32, 120, 160  # size of a letter's vector; letters to write; room in the cache

torch.manual_seed(0)
VECTORS = torch.nn.functional.normalize(torch.randn(len(LETTERS), WIDTH), dim=1)
NEXT = torch.randn(WIDTH, len(LETTERS)) * 4


def model_pass(tree: Tree, lengths: Tensor, cache: KVCache) -> Tensor:
    """(1, N+1, V) logits after each node of the tree, as if its path were the end of the text."""
    slots = lengths[:, None] + torch.arange(tree.nodes + 1)  # behind the text, one slot for each node
    vectors = VECTORS[tree.tokens]
    keys, values = cache.write(0, vectors[:, None], vectors[:, None], slots)
    sees = tree_visibility(lengths, tree.mask, SLOTS)  # the text, the node's ancestors and the node: no other branch
    place = slot_positions(lengths, tree.depths, SLOTS)
    distance = (lengths[:, None] + tree.depths)[:, :, None] - place[:, None]
    scores = vectors @ keys[:, 0].mT - 0.3 * distance
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return weights @ values[:, 0] @ NEXT


def guess_next(state: None, tokens: Tensor, parents: Tensor) -> tuple[Tensor, None]:
    """The drafter's network: what it expects after each of these letters (1, W) of the beam."""
    return VECTORS[tokens] @ NEXT, None


def write(prompt: str, shape: Shape | None, temperature: float, seed: int) -> tuple[str, list[str]]:
    """The text, and what each pass of the model added to it. Without a shape: plain decoding."""
    rule = make_rule(RuleConfig(name="seeded"), shape or Shape(width=1, length=1), len(LETTERS), torch.float32)
    sampling = Sampling.of([SamplingParams(temperature=temperature)], len(LETTERS), "cpu")
    cache, lengths, seeds = KVCache(SLOTS), torch.tensor([0]), torch.tensor([seed])
    for letter in prompt[:-1]:  # read the prompt; its last letter is the root of the first tree
        model_pass(root_tree(torch.tensor([LETTERS.index(letter)])), lengths, cache)
        lengths = lengths + 1
    last = torch.tensor([LETTERS.index(prompt[-1])])

    pieces: list[str] = []
    while sum(map(len, pieces)) < LENGTH:
        search = rule.search(sampling, seeds, lengths)
        # 1. Draft: a beam search, packed into a tree whose nodes share their beginnings.
        tree = root_tree(last) if shape is None else search.tree(guess_next, None, last)
        # 2. Verify: one pass of the model over all nodes.
        logits = model_pass(tree, lengths, cache)
        # 3. Accept: follow the model's own choices down the tree while the tree has them; then one more for nothing.
        accepted = rule.accept(search, tree, logits, None)
        # 4. Commit: the keys of the accepted path move behind the text, those of all other nodes are forgotten.
        cache.commit(lengths, accepted.path, accepted.count)
        new = accepted.tokens[0, : int(accepted.count)]
        lengths, last = lengths + len(new), new[-1:]
        pieces.append("".join(LETTERS[int(token)] for token in new))
    return "".join(pieces)[:LENGTH], pieces


if __name__ == "__main__":
    for temperature in (0.0, 1.0):
        plain, passes = write("hello world", None, temperature, seed=7)
        text, pieces = write("hello world", Shape(width=4, length=4, nodes=12), temperature, seed=7)
        print(f"temperature {temperature}: {len(passes)} passes one letter at a time, {len(pieces)} with guesses")
        print("|".join(pieces))
        assert text == plain, "the text must be the model's own"
