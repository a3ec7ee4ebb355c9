"""How the target chooses a token at each node, and the path of the tree that follows its choices.

Penalties come first, then temperature, then top-k, top-p and min-p, then noise.
"""

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_p

from redrafter_mlx.config import SamplingParams
from redrafter_mlx.tree import Tree, gather


def count_tokens(tokens: list[list[int]], vocab_size: int) -> mx.array:
    """Token ids of each row -> (B, V) occurrences."""
    counts = mx.zeros((len(tokens), vocab_size))
    for row, ids in enumerate(tokens):
        counts = counts.at[row, mx.array(ids)].add(1.0)
    return counts


def penalise(logits: mx.array, params: SamplingParams, counts: mx.array, tree: Tree) -> mx.array:
    """Repetition, presence and frequency penalties for fp32 logits (B, N+1, V).

    `counts` (B, V) are the occurrences up to the root; each node adds those of its own path.
    """
    batch, n, _ = tree.mask.shape
    below_root = (tree.mask & (mx.arange(n) > 0)).astype(counts.dtype)
    row, node = mx.arange(batch)[:, None, None], mx.arange(n)[None, :, None]
    seen = mx.repeat(counts[:, None], n, axis=1).at[row, node, tree.tokens[:, None]].add(below_root)
    repeated = mx.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
    logits = mx.where(seen > 0, repeated - params.presence_penalty, logits)
    return logits - params.frequency_penalty * seen


def restrict(scores: mx.array, params: SamplingParams) -> mx.array:
    """-inf outside top-k, then top-p, then min-p, for logits / T (..., V). Equal scores are kept or dropped together.

    >>> params = SamplingParams(temperature=1.0, top_k=3, top_p=0.8)
    >>> (restrict(mx.log(mx.array([0.5, 0.3, 0.15, 0.05])), params) > -mx.inf).tolist()
    [True, True, False, False]
    """
    if 0 < params.top_k < scores.shape[-1]:
        edge = mx.topk(scores, params.top_k, axis=-1).min(-1, keepdims=True)
        scores = mx.where(scores < edge, -mx.inf, scores)
    if params.top_p < 1:
        scores = apply_top_p(scores - mx.logsumexp(scores, axis=-1, keepdims=True), params.top_p)
    if params.min_p > 0:
        scores = apply_min_p(scores, params.min_p)
    return scores


def target_choices(
    logits: mx.array, tree: Tree, params: SamplingParams, noise: mx.array | None, counts: mx.array | None
) -> mx.array:
    """(B, N+1) the token that plain decoding would choose at each node, from its logits (B, N+1, V).

    The noise (B, L+1, V) of a node is that of its depth; None at temperature 0.
    """
    logits = logits.astype(mx.float32)
    if counts is not None:
        logits = penalise(logits, params, counts, tree)
    if noise is None:  # no filter removes the best token
        return logits.argmax(-1).astype(mx.int32)
    there = mx.take_along_axis(noise, tree.depths[:, :, None], axis=1)
    return (restrict(logits / params.temperature, params) + there).argmax(-1).astype(mx.int32)


class Accepted(NamedTuple):
    """What one step decided. The target chose entry j of `tokens` at node `path[:, j]`."""

    path: mx.array  # (B, L+1) node indices, root first; entries from `count` on are meaningless
    tokens: mx.array  # (B, L+1) new tokens: the accepted ones, then the target's own next one
    count: mx.array  # (B,) new tokens: accepted + 1
    nodes: mx.array  # (B,) verified nodes that held a drafted token


def path_to(tree: Tree, leaf: mx.array) -> mx.array:
    """(B,) node indices -> (B, L+1) the nodes from the root down to each."""
    above = mx.take_along_axis(tree.mask, leaf[:, None, None], axis=1)  # (B, 1, N+1)
    depth = mx.arange(tree.length + 1)[:, None]
    return (above & (tree.depths[:, None] == depth)).astype(mx.int32).argmax(-1).astype(mx.int32)


def deepest(tree: Tree, hit: mx.array) -> mx.array:
    """(B, N+1) bool -> (B,) the deepest node that is hit together with all its ancestors."""
    hit = (hit & tree.valid) | (mx.arange(hit.shape[1]) == 0)
    reached = (hit[:, None] | ~tree.mask).all(-1)
    return mx.where(reached, tree.depths, -1).argmax(-1).astype(mx.int32)


def accept_seeded(choice: mx.array, tree: Tree) -> Accepted:
    """Follow the target's choices (B, N+1) down the tree for as long as the choice at a node is one of its children.

    >>> from redrafter_mlx.tree import pack_beam
    >>> tree, _ = pack_beam(mx.array([[[5, 6], [5, 7]]]), mx.array([4]))  # 4 -> 5 -> {6, 7}
    >>> accepted = accept_seeded(mx.array([[5, 7, 0, 8, 0]]), tree)  # after 4: 5; after 5: 7; after 7: 8
    >>> accepted.tokens.tolist(), accepted.count.tolist()
    ([[5, 7, 8]], [3])
    """
    leaf = deepest(tree, tree.tokens == gather(choice, tree.parents))
    path = path_to(tree, leaf)
    depth = gather(tree.depths, leaf[:, None])[:, 0]
    return Accepted(path, gather(choice, path), depth + 1, tree.valid.astype(mx.int32).sum(1) - 1)
