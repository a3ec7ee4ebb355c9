"""The self-check: tries whether a model can verify trees, instead of keeping a list of model names."""

from dataclasses import replace

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from redrafter_mlx.cache import TreeCache
from redrafter_mlx.errors import UnsupportedTarget
from redrafter_mlx.target import Target
from redrafter_mlx.tree import Tree, pack_beam

PROMPT, WIDTH, LENGTH = 12, 3, 3
FAR_POSITIONS = (100, 5_000, 50_000)


def check(target: Target) -> None:
    """Raise UnsupportedTarget, with the reason, unless each tree node gets the logits of its path alone."""
    try:
        tree_gap, far_gap = _tree_gap(target), _far_gap(target)
    except UnsupportedTarget:
        raise
    except Exception as error:  # of the model: any
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedTarget(
            f"{target.name} does not take a KV cache, its mask and its positions as most models of mlx-lm do "
            f"({type(error).__name__}: {reason})"
        ) from error
    allowed = tolerance(target.dtype)
    if not tree_gap <= allowed:
        raise UnsupportedTarget(
            f"{target.name} gives a tree node other logits than its path alone (difference {tree_gap:.2g}, allowed "
            f"{allowed:.2g}): it ignores the attention mask or the positions"
        )
    if not far_gap <= allowed:
        raise UnsupportedTarget(
            f"{target.name} gives tree nodes other logits than neighbouring tokens at far positions (difference "
            f"{far_gap:.2g}, allowed {allowed:.2g})"
        )


def tolerance(dtype: mx.Dtype) -> float:
    """Largest difference of logits that rounding explains, relative to their spread."""
    return {mx.float32: 1e-3, mx.float16: 0.1}.get(dtype, 0.3)


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
    lengths = [PROMPT, PROMPT - 5]
    tokens = random_tokens(target, 2, PROMPT).tolist()
    beam = random_tokens(target, 2, WIDTH, LENGTH + 1)
    last, beam = beam[:, 0, 0], beam[:, :, 1:]
    shared = mx.concatenate([beam[:, :1, : LENGTH - 1], beam[:, 1:2, LENGTH - 1 :]], axis=-1)
    beam = mx.concatenate([beam[:, :1], shared, beam[:, 2:]], axis=1)  # siblings: a mask that shows one is noticed
    caches = [target.make_cache() for _ in lengths]
    for row, length in enumerate(lengths):
        target.read(tokens[row][:length], caches[row])
    both, _ = pack_beam(beam, last)
    nodes = both.tokens.tolist()
    alone: dict[tuple[int, ...], mx.array] = {}  # (row, *path) -> logits
    for row, length in enumerate(lengths):
        for path in _paths(both, row):
            whole = tokens[row][:length] + [nodes[row][node] for node in path]
            logits = target.model(mx.array([whole]), cache=make_prompt_cache(target.model))
            alone[row, *path] = logits[0, length:]
    gap = 0.0
    for trees, cache, rows in ((_row(both, 0), caches[0], [0]), (both, TreeCache.joined(caches), [0, 1])):
        found, _ = target.verify(trees, cache)
        for place, row in enumerate(rows):
            for path in _paths(both, row):
                gap = max(gap, relative_gap(alone[row, *path], found[place][mx.array(path)]))
    return gap


def _row(tree: Tree, row: int) -> Tree:
    names = ("tokens", "parents", "depths", "valid", "mask")
    return replace(tree, **{name: getattr(tree, name)[row : row + 1] for name in names})


def _paths(tree: Tree, row: int) -> list[list[int]]:
    """From the root to each leaf: together they cover all nodes."""
    valid, inner = tree.valid[row].tolist(), set(tree.parents[row, 1:].tolist())
    leaves = [node for node in range(tree.nodes + 1) if valid[node] and node not in inner]
    return [[i for i, above in enumerate(tree.mask[row, leaf].tolist()) if above] for leaf in leaves]


def _far_gap(target: Target) -> float:
    """The same four tokens as neighbours and as a tree without branches, far behind in the context."""
    tokens = random_tokens(target, 1, 4)
    chain, _ = pack_beam(tokens[:, None, 1:], tokens[:, 0])
    gap = 0.0
    for position in (0, *(p for p in FAR_POSITIONS if p + 4 < target.max_positions)):
        near, _ = target.run(tokens, target.make_cache(position), None)
        nodes, _ = target.run(tokens, target.make_cache(position), chain)
        gap = max(gap, relative_gap(near[0], nodes[0]))
    return gap
