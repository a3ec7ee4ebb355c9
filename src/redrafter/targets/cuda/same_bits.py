"""Whether a token's logits have the same bits in every pass: alone, in a tree, in a prompt, beside other rows.

Decided by trying, on the model itself with random tokens. A kernel that sums in another order, or a layer that is not
fused, shows here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.tree import Tree, candidate_nodes, pack, root_tree
from redrafter.kernels import compiles_only
from redrafter.targets.cuda.tree_target import TreeTarget

LENGTHS = (5, 530)
"""Tokens before the tree: fewer than the newest keys, and several blocks and parts of keys."""
WIDTH, DEPTH, NODES = 12, 6, 63
PROMPT = 512


@torch.no_grad()
def same_bits(verifier: TreeTarget) -> bool:
    """Whether nodes that are read one after the other, or as a prompt, get the bits that the tree's pass gives them."""
    if not verifier.forwards.fused:
        return False
    longest = verifier.target.max_positions - NODES - 2
    if longest < 1:
        return False

    return all(_same_after(verifier, min(n, longest)) for n in LENGTHS) and _same_in_pieces(verifier)


def _equal(one: Tensor, other: Tensor) -> bool:
    return compiles_only() or torch.equal(one, other)


def _same_in_pieces(verifier: TreeTarget) -> bool:
    """A prompt read at once and in pieces. The library may compute products of as many tokens as are read at once."""
    size = min(PROMPT, verifier.target.max_positions)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(verifier.target.vocab_size, (1, size), generator=random).to(verifier.target.device)

    def read(pieces: Sequence[int]) -> Tensor:
        cache, found, begin = _random_cache(verifier, 1, size), [], 0
        for n in pieces:
            at = torch.tensor([begin], device=prompt.device)
            depths = torch.arange(n, device=prompt.device)[None]
            with verifier.using(cache):
                found.append(verifier.forward(prompt[:, begin : begin + n], depths, None, at, ())[0])
            begin += n
        return torch.cat(found, dim=1)

    return _equal(read([size]), read([size // 3, size // 2, size - size // 3 - size // 2]))


def _same_after(verifier: TreeTarget, length: int) -> bool:
    target = verifier.target
    random = torch.Generator().manual_seed(length)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(target.vocab_size, shape, generator=random).to(target.device)

    tree = _random_tree(tokens(1, WIDTH, DEPTH), tokens(1), random)
    caches = {rows: _random_cache(verifier, rows, length) for rows in (1, 3)}
    together = _logits(verifier, caches[1], tree, [length])[0]
    real = tree.valid[0]
    beside = _logits(verifier, caches[3], _repeated(tree, 3), [length, length // 2, length])
    if not (_equal(beside[0][real], together[real]) and _equal(beside[2][real], together[real])):
        return False
    inner = set(tree.parents[0, 1:].tolist())
    leaves = [n for n in range(tree.nodes + 1) if bool(tree.valid[0, n]) and n not in inner]
    some = leaves[:1] if compiles_only() else leaves[:: max(1, len(leaves) // 3)]  # all paths run the same kernels
    return all(_same_alone(verifier, caches[1], tree, leaf, length, together) for leaf in some)


def _same_alone(verifier: TreeTarget, cache: KVCache, tree: Tree, leaf: int, length: int, want: Tensor) -> bool:
    """The path to a leaf, read token by token and as a piece of a prompt."""
    path = tree.mask[0, leaf].nonzero()[:, 0]
    at = torch.tensor([length], device=verifier.target.device)
    depths = torch.arange(len(path), device=verifier.target.device)[None]
    with verifier.using(cache):
        read, _ = verifier.forward(tree.tokens[:, path], depths, None, at, ())
    if not _equal(read[0], want[path]):
        return False
    nodes = path[:1].tolist() if compiles_only() else path.tolist()
    one_by_one = (
        _logits(verifier, cache, root_tree(tree.tokens[:, node]), [length + i])[0, 0] for i, node in enumerate(nodes)
    )
    return all(_equal(got, want[node]) for got, node in zip(one_by_one, nodes, strict=True))


def _repeated(tree: Tree, rows: int) -> Tree:
    """The tree of one row as the trees of several."""
    tokens, parents, depths, valid, mask = (
        x.expand(rows, *x.shape[1:]) for x in (tree.tokens, tree.parents, tree.depths, tree.valid, tree.mask)
    )
    return Tree(tokens, parents, depths, valid, mask, tree.length)


def _random_tree(beam: Tensor, last: Tensor, random: torch.Generator) -> Tree:
    """Packed on a CPU: while kernels are only compiled, a tree that a kernel packs means nothing."""
    scores = torch.rand(beam.shape, generator=random).cumsum(-1).neg()
    tree, _ = pack(candidate_nodes(beam.cpu(), scores)[0], last.cpu(), NODES)
    tokens, parents, depths, valid, mask = (
        x.to(beam.device) for x in (tree.tokens, tree.parents, tree.depths, tree.valid, tree.mask)
    )
    return Tree(tokens, parents, depths, valid, mask, tree.length)


def _random_cache(verifier: TreeTarget, rows: int, length: int) -> KVCache:
    """Rows with the same random keys and values, made where they are kept: a CPU needs a second for a model of 7B."""
    cache = KVCache(slots=length + NODES + 1)
    for layer, kinds in verifier.target.kv_layout().items():
        made = []
        for kind, (heads, size, dtype, device) in enumerate(kinds):
            random = torch.Generator(device).manual_seed(2 * layer + kind)
            one = torch.randn(1, heads, cache.slots, size, generator=random, device=device).to(dtype)
            made.append(one.repeat(rows, 1, 1, 1))
        cache.layers[layer] = (made[0], made[1])
    return cache


def _logits(verifier: TreeTarget, cache: KVCache, tree: Tree, lengths: list[int]) -> Tensor:
    with verifier.using(cache):
        at = torch.tensor(lengths, device=verifier.target.device)
        found: tuple[Tensor, Tensor] = verifier.verify(tree, at, cache, ())
    return found[0]
