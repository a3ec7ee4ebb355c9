"""Whether a token's logits have the same bits in every pass: alone, in a tree, in a prompt, beside other rows.

Decided by trying, on the model itself with random tokens. A kernel that sums in another order, or a layer that is not
fused, shows here.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.flat import Flat, Piece, budgeted, of_pieces, of_trees, put_trees
from redrafter.core.rows import map_tensors
from redrafter.core.transfer import put
from redrafter.core.tree import Tree, candidate_nodes, pack, root_tree
from redrafter.kernels import compiles_only
from redrafter.targets.cuda.tree_target import TreeTarget

log = logging.getLogger(__name__)

LENGTHS = (5, 530)
"""Tokens before the tree: fewer than the newest keys, and several blocks and parts of keys."""
WIDTH, DEPTH, NODES = 12, 6, 63
KEPT = 20
"""Nodes of the smaller trees in a mixture."""
PROMPT, BESIDE = 512, 37
"""Tokens of a prompt, and of the piece of a prompt that is read beside trees."""


@torch.no_grad()
def same_bits(verifier: TreeTarget) -> bool:
    """Whether tokens get the bits that a tree's pass gives them: one after the other, as a prompt, in any mixture."""
    if not verifier.fused:
        return False
    longest = verifier.target.max_positions - NODES - 2
    if longest < 1:
        return False

    return all(_same_after(verifier, min(n, longest)) for n in LENGTHS) and _same_in_pieces(verifier)


def _equal(what: str, one: Tensor, other: Tensor) -> bool:
    if compiles_only() or torch.equal(one, other):
        return True
    gap = (one.double() - other.double()).abs().max()
    log.info("the logits of %s have other bits than those of a tree alone (difference up to %.2g)", what, gap)
    return False


def _read(verifier: TreeTarget, cache: KVCache, flat: Flat) -> Tensor:
    """The logits of all lines of a pass."""
    device = verifier.target.device
    logits: Tensor = verifier.run(Flat(put(flat.lines, device), put(flat.runs, device)), cache, ())[0]
    return logits


def _same_in_pieces(verifier: TreeTarget) -> bool:
    """A prompt read at once and in pieces. The library may compute products of as many tokens as are read at once."""
    size = min(PROMPT, verifier.target.max_positions)
    random = torch.Generator().manual_seed(0)
    prompt = torch.randint(verifier.target.vocab_size, (size,), generator=random).tolist()

    def read(pieces: Sequence[int]) -> Tensor:
        cache, parts, begin = _random_cache(verifier, 1, size), [], 0
        for n in pieces:
            piece = Piece(0, begin, prompt[begin : begin + n])
            parts.append(_read(verifier, cache, of_pieces([piece], verifier.longest)))
            begin += n
        return torch.cat(parts)

    return _equal("a prompt in pieces", read([size // 3, size // 2, size - size // 3 - size // 2]), read([size]))


def _same_after(verifier: TreeTarget, length: int) -> bool:
    target = verifier.target
    random = torch.Generator().manual_seed(length)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(target.vocab_size, shape, generator=random).to(target.device)

    tree = _random_tree(tokens(1, WIDTH, DEPTH), tokens(1), random)
    cache = _random_cache(verifier, 1, length)
    alone = _logits(verifier, cache, tree, length)
    if not _same_beside(verifier, tree, length, alone, tokens(BESIDE).tolist()):
        return False
    inner = set(tree.parents[0, 1:].tolist())
    leaves = [n for n in range(tree.nodes + 1) if bool(tree.valid[0, n]) and n not in inner]
    some = leaves[:1] if compiles_only() else leaves[:: max(1, len(leaves) // 3)]  # all paths run the same kernels
    return all(_same_path(verifier, cache, tree, leaf, length, alone) for leaf in some)


def _same_beside(verifier: TreeTarget, tree: Tree, length: int, want: Tensor, prompt: list[int]) -> bool:
    """The tree in a mixture: between trees of other sizes, a plain row, a piece of a prompt and padding."""
    rows = 4
    cache = _random_cache(verifier, rows + 1, length)
    lengths = torch.tensor([length, length // 2, length, 1], device=tree.tokens.device)
    several = _repeated(tree, rows)
    real = several.valid.clone()
    if tree.scores is not None and not compiles_only():
        real[1:2] = budgeted(tree, tree.scores, KEPT)
    real[3, 1:] = False  # plain decoding
    area = rows * (tree.nodes + 1)
    flat = Flat.empty(area + BESIDE + 3, rows + 1, lengths.device)
    of_tree = Flat(flat.lines[:area], flat.runs[:rows])
    at = put_trees(of_tree, several, real, lengths, torch.arange(rows, device=lengths.device), verifier.longest)
    piece = of_pieces([Piece(rows, min(3, length), prompt)], verifier.longest)
    flat.lines[area : area + BESIDE] = put(piece.lines, lengths.device)
    flat.runs[rows:] = put([[area, BESIDE]], lengths.device)
    logits = _read(verifier, cache, flat)
    valid = tree.valid[0]
    return all(_equal("a tree in a mixture", logits[at[row]][valid], want[valid]) for row in (0, 2))


def _same_path(verifier: TreeTarget, cache: KVCache, tree: Tree, leaf: int, length: int, want: Tensor) -> bool:
    """The path to a leaf, read token by token and as a piece of a prompt."""
    path = tree.mask[0, leaf].nonzero()[:, 0]
    piece = Piece(0, length, tree.tokens[0, path].tolist())
    if not _equal("a piece of a prompt", _read(verifier, cache, of_pieces([piece], verifier.longest)), want[path]):
        return False
    nodes = path[:1].tolist() if compiles_only() else path.tolist()
    one_by_one = (
        _logits(verifier, cache, root_tree(tree.tokens[:, node]), length + i)[0] for i, node in enumerate(nodes)
    )
    return all(_equal("single tokens", got, want[node]) for got, node in zip(one_by_one, nodes, strict=True))


def _repeated(tree: Tree, rows: int) -> Tree:
    """The tree of one row as the trees of several."""
    return map_tensors(tree, lambda x: x.expand(rows, *x.shape[1:]))


def _random_tree(beam: Tensor, last: Tensor, random: torch.Generator) -> Tree:
    """Packed on a CPU: while kernels are only compiled, a tree that a kernel packs means nothing."""
    scores = torch.rand(beam.shape, generator=random).cumsum(-1).neg()
    tree, _ = pack(candidate_nodes(beam.cpu(), scores)[0], last.cpu(), NODES)
    return map_tensors(tree, lambda x: x.to(beam.device))


def _random_cache(verifier: TreeTarget, rows: int, length: int) -> KVCache:
    """Rows with the same random keys and values, made where they are kept: a CPU needs a second for a model of 7B."""
    cache = KVCache(slots=length + max(NODES, BESIDE) + 4)
    for layer, kinds in verifier.target.kv_layout().items():
        pair = []
        for kind, (heads, size, dtype, device) in enumerate(kinds):
            random = torch.Generator(device).manual_seed(2 * layer + kind)
            one = torch.randn(1, heads, cache.slots, size, generator=random, device=device).to(dtype)
            pair.append(one.repeat(rows, 1, 1, 1))
        cache.layers[layer] = (pair[0], pair[1])
    return cache


def _logits(verifier: TreeTarget, cache: KVCache, tree: Tree, length: int) -> Tensor:
    """(N+1, V) logits of one row's tree."""
    flat, at = of_trees(tree, torch.tensor([length], device=verifier.target.device), verifier.longest)
    return _read(verifier, cache, flat)[at[0]]
