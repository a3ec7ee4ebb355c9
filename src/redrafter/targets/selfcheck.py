"""Can this model be verified as a tree? Decided by trying, not by a list of names."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.tree import Tree, pack_beam
from redrafter.errors import UnsupportedTarget
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

PROMPT, WIDTH, LENGTH = 12, 3, 3


@torch.no_grad()
def check(target: Target) -> None:
    """Raise UnsupportedTarget, with the reason, unless trees give each node its own path's logits."""
    name = type(target.model).__name__
    try:
        tree_gap, batch_gap = _tree_gap(target, target.verify), _batch_gap(target)
    except UnsupportedTarget:
        raise
    except Exception as error:
        raise UnsupportedTarget(
            f"{name} does not take a 4D attention mask, position ids and a key-value cache as causal LMs of "
            f"transformers do ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error
    allowed = tolerance(target.dtype)
    if not tree_gap <= allowed:
        raise UnsupportedTarget(
            f"{name} gives a tree node other logits than its path alone (difference {tree_gap:.2g}, allowed "
            f"{allowed:.2g}): it ignores the attention mask or the positions, or keeps a recurrent state"
        )
    if not batch_gap <= allowed:
        raise UnsupportedTarget(
            f"{name} gives a row other logits when another row of the batch stands at a far position (difference "
            f"{batch_gap:.2g}, allowed {allowed:.2g}): its rotary scaling looks at the longest position"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Largest difference of logits that rounding explains, relative to their spread.

    In fp64 too much more than its own: eager attention computes its softmax in fp32.
    """
    return {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.1}.get(dtype, 0.3)


def _relative_gap(logits: Tensor, other: Tensor) -> float:
    """(n, V) twice -> the worst row's distance, as a share of the row's own spread; inf where not a number."""
    logits, other = logits.double(), other.double()
    spread = (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)
    gap = float(((logits - other).norm(dim=-1) / spread).max())
    return gap if gap == gap else float("inf")


def hidden_window(target: Target) -> int:
    """A window that the config names in words of its own and `AttentionPlan` does not know, 0 if none.

    The check's prompt must be longer than that, or a model that counts it in slots would pass.
    """
    known = ("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")
    sizes = [v for k, v in target.config.to_dict().items() if "window" in k and k not in known]
    return max((v for v in sizes if isinstance(v, int) and not isinstance(v, bool)), default=0)


def _random_tokens(target: Target, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, shape, generator=generator).to(target.device)


@torch.no_grad()
def check_tree_kernel(target: Target) -> None:
    """Raise UnsupportedTarget unless the tree kernel gives the logits that the model's own attention gives."""
    if target.dtype == torch.float64:
        raise UnsupportedTarget("the tree kernel knows no fp64")

    def verify(tree: Tree, lengths: Tensor, cache: KVCache, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        tree_target = TreeTarget(target)
        with tree_target.serving(cache):
            found: tuple[Tensor, Tensor] = tree_target.verify(tree, lengths, cache, layers)
            return found

    try:
        gap = _tree_gap(target, verify)
    except UnsupportedTarget:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedTarget(f"the tree kernel fails: {type(error).__name__}: {reason}") from error
    if not gap <= tolerance(target.dtype):
        raise UnsupportedTarget(f"the tree kernel gives other logits (difference {gap:.2g})")


def _tree_gap(target: Target, verify: Callable[..., tuple[Tensor, Tensor]]) -> float:
    """Two ragged prompts, a random tree on each, against every path run on its own by the model alone."""
    prompt = min(PROMPT + hidden_window(target), target.max_positions - LENGTH - 1)
    lengths = [prompt, prompt - 5]
    tokens = _random_tokens(target, 2, prompt)
    last = _random_tokens(target, 2, 1)[:, 0]
    beam = _random_tokens(target, 2, WIDTH, LENGTH)
    beam[:, 1, : LENGTH - 1] = beam[:, 0, : LENGTH - 1]  # siblings, so that hiding one matters
    tree, _ = pack_beam(beam, last)
    cache = KVCache(slots=prompt + tree.nodes + 1)
    target.prefill(tokens, lengths, cache, ())
    logits, _ = verify(tree, torch.tensor(lengths, device=target.device), cache, ())
    gap = 0.0
    for row, length in enumerate(lengths):
        for node in _leaves(tree, row):
            path = tree.mask[row, node].nonzero()[:, 0]
            whole = torch.cat([tokens[row, :length], tree.tokens[row, path]])
            alone = target.model(input_ids=whole[None], use_cache=False).logits[0, length:].to(target.device)
            gap = max(gap, _relative_gap(alone, logits[row, path]))
    return gap


def _leaves(tree: Tree, row: int) -> list[int]:
    """Nodes whose paths, together, cover the tree."""
    inner = set(tree.parents[row, 1:].tolist())
    return [n for n in range(tree.nodes + 1) if bool(tree.valid[row, n]) and n not in inner]


def _batch_gap(target: Target) -> float:
    """A row's logits must not depend on how far along another row of the batch is."""
    tokens = _random_tokens(target, 2, 4)
    near = torch.arange(4, device=target.device)
    far = near + target.max_positions - 4
    visible = (near[:, None] >= near[None, :])[None]

    def run(rows: int, positions: Tensor) -> Tensor:
        slots = near.expand(rows, -1)
        logits, _ = target.forward(
            tokens[:rows], positions, slots, visible.expand(rows, -1, -1), positions, KVCache(slots=4), ()
        )
        return logits[0]

    alone = run(1, near[None])
    beside = run(2, torch.stack([near, far]))
    return _relative_gap(alone, beside)


def check_with_fallback(target: Target) -> None:
    """Check; if the attention implementation is what fails, try transformers' own eager one."""
    try:
        check(target)
    except UnsupportedTarget:
        implementation: Any = getattr(target.config, "_attn_implementation", None)
        if implementation in (None, "eager") or not hasattr(target.model, "set_attn_implementation"):
            raise
        target.model.set_attn_implementation("eager")
        try:
            check(target)
        except UnsupportedTarget:
            target.model.set_attn_implementation(implementation)
            raise
        log.info("%s cannot verify trees under %s attention; using eager", target.name, implementation)
