"""How the target chooses a token: penalties, then temperature, then top-k, top-p and min-p, then noise."""

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_p

from redrafter_mlx.config import SamplingParams
from redrafter_mlx.tree import Tree


def count_tokens(tokens: list[list[int]], vocab_size: int) -> mx.array:
    """Token ids of each row -> (B, V) occurrences."""
    counts = mx.zeros((len(tokens), vocab_size))
    for row, ids in enumerate(tokens):
        counts = counts.at[row, mx.array(ids)].add(1.0) if ids else counts
    return counts


def node_counts(counts: mx.array, tree: Tree) -> mx.array:
    """(B, V) occurrences up to the root -> (B, N+1, V) up to each node, along its own path."""
    batch, n, _ = tree.mask.shape
    each = mx.repeat(counts[:, None], n, axis=1)
    below_root = (tree.mask & (mx.arange(n) > 0)).astype(counts.dtype)
    row, node = mx.arange(batch)[:, None, None], mx.arange(n)[None, :, None]
    return each.at[row, node, tree.tokens[:, None]].add(below_root)


def penalise(logits: mx.array, params: SamplingParams, counts: mx.array, tree: Tree) -> mx.array:
    """Repetition, presence and frequency penalties over prompt and path, for fp32 logits (B, N+1, V)."""
    seen = node_counts(counts, tree)
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
