"""The self-check: tries whether a model can verify trees, instead of keeping a list of model names."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.errors import UnsupportedTarget
from redrafter_mlx.target import Target
from redrafter_mlx.tree import pack_beam

WIDTH, LENGTH = 3, 3
FAR_POSITIONS = (100, 5_000, 50_000)
TOLERANCE = {mx.float32: 1e-3, mx.float16: 0.1}  # difference of logits that rounding explains, relative to their spread


def check(target: Target) -> None:
    """Raise UnsupportedTarget, with the reason, unless each tree node gets the logits of its path alone."""
    try:
        tree_gap, far_gap = _tree_gap(target), _far_gap(target)
    except Exception as error:  # of the model: any
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedTarget(
            f"{target.name} does not take a KV cache, its mask and its positions as most models of mlx-lm do "
            f"({type(error).__name__}: {reason})"
        ) from error
    allowed = TOLERANCE.get(target.dtype, 0.3)
    for gap, what in (
        (tree_gap, "a tree node other logits than its path alone"),
        (far_gap, "tree nodes other logits than neighbouring tokens at far positions"),
    ):
        if gap > allowed:
            raise UnsupportedTarget(
                f"{target.name} gives {what} (difference {gap:.2g}, allowed {allowed:.2g}): it ignores the attention "
                "mask or the positions"
            )


def relative_gap(logits: mx.array, other: mx.array) -> float:
    """Largest distance between rows of two (n, V) arrays, relative to the row's spread; inf if it is not a number."""
    logits, other = logits.astype(mx.float32), other.astype(mx.float32)
    spread = mx.linalg.norm(logits - logits.mean(-1, keepdims=True), axis=-1)
    gap = float((mx.linalg.norm(logits - other, axis=-1) / spread).max())
    return gap if gap == gap else float("inf")


def random_tokens(target: Target, *shape: int) -> mx.array:
    return mx.random.randint(0, target.vocab_size, shape, key=mx.random.key(0))


def _tree_gap(target: Target) -> float:
    """Difference between trees on two ragged prompts and each path alone, run by the model with its own cache."""
    prompts = [row[:length] for row, length in zip(random_tokens(target, 2, 12).tolist(), (12, 7), strict=True)]
    tokens = random_tokens(target, 2, WIDTH, LENGTH + 1)
    tokens[:, 1, :LENGTH] = tokens[:, 0, :LENGTH]  # siblings: a mask that shows one is noticed
    tokens[:, :, 0] = tokens[:, :1, 0]
    alone = []
    for prompt, paths in zip(prompts, tokens.tolist(), strict=True):
        whole = mx.array([prompt + path for path in paths])
        alone.append(target.model(whole, cache=make_prompt_cache(target.model))[:, len(prompt) :])
    gap = 0.0
    for rows in (1, 2):
        cache = target.make_cache(rows)
        target.read(prompts[:rows], cache)
        tree, place = pack_beam(tokens[:rows, :, 1:], tokens[:rows, 0, 0])
        found, _ = target.run(tree.tokens, cache, tree)
        for row in range(rows):
            for path in range(WIDTH):
                nodes = mx.array([0, *place[row, path].tolist()])
                gap = max(gap, relative_gap(alone[row][path], found[row][nodes]))
    return gap


def _far_gap(target: Target) -> float:
    """The same four tokens as neighbours and as a tree without branches, far behind in the context."""
    tokens = random_tokens(target, 1, 4)
    chain, _ = pack_beam(tokens[:, None, 1:], tokens[:, 0])
    gap = 0.0
    for position in (0, *(p for p in FAR_POSITIONS if p + 4 < target.max_positions)):
        near, _ = target.run(tokens, target.make_cache(shift=position))
        nodes, _ = target.run(tokens, target.make_cache(shift=position), chain)
        gap = max(gap, relative_gap(near[0], nodes[0]))
    return gap
