"""The self-check: tries whether a model can verify trees, instead of keeping a list of model names."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.recurrence import TextPass
from redrafter.core.tree import pack_beam
from redrafter.errors import UnsupportedTarget
from redrafter.kernels import compiles_only
from redrafter.targets.attention import attention_implementations
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.recurrence_check import leaves, recurrence_gap, relative_gap
from redrafter.targets.target import Target

log = logging.getLogger(__name__)

PROMPT, WIDTH, LENGTH = 12, 3, 3
FAR_POSITIONS = (100, 5_000, 50_000)
"""Positions to look at besides the first and the last of the context."""
SAME_PASS = 30
"""How much stricter to be with two passes that are the same computation."""

RECURRENT = 1e-4
"""The least tolerance for a model with a recurrent state: it keeps fp32 sums over the whole text, in fp64 too."""


@torch.no_grad()
def check(target: Target) -> None:
    """Raise UnsupportedTarget, with the reason, unless each tree node gets the logits of its path alone."""
    name = type(target.model).__name__
    try:
        tree_gap = recurrence_gap(target) if target.recurrent else _tree_gap(target, target.verify)
        batch_gap = _batch_gap(target)
        far_gap, length_gap = _far_gaps(target)
    except UnsupportedTarget:
        raise
    except Exception as error:
        raise UnsupportedTarget(
            f"{name} does not take a 4D attention mask, position ids and a key-value cache as causal LMs of "
            f"transformers do ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error
    allowed = tolerance(target.precision)
    if target.recurrent:
        allowed = max(allowed, RECURRENT)
    if not tree_gap <= allowed:
        raise UnsupportedTarget(
            f"{name} gives a tree node other logits than its path alone (difference {tree_gap:.2g}, allowed "
            f"{allowed:.2g}): it ignores the attention mask or the positions, or keeps a recurrent state"
        )
    if not batch_gap <= allowed:
        raise UnsupportedTarget(
            f"{name} gives a row other logits when another row of the batch is at a far position (difference "
            f"{batch_gap:.2g}, allowed {allowed:.2g}): its rotary scaling looks at the longest position"
        )
    if not far_gap <= allowed:
        raise UnsupportedTarget(
            f"{name} gives other logits with a KV cache than without at far positions (difference {far_gap:.2g}, "
            f"allowed {allowed:.2g})"
        )
    if not length_gap <= allowed / SAME_PASS:
        raise UnsupportedTarget(
            f"{name} takes positions from the length of the KV cache instead of position_ids (difference "
            f"{length_gap:.2g}): the rows of a batch differ in length, so all but one would get wrong positions"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Largest difference of logits that rounding explains, relative to their spread.

    For fp64 it is far above fp64's rounding, because eager attention computes its softmax in fp32.
    """
    return {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.1}.get(dtype, 0.3)


def hidden_window(target: Target) -> int:
    """The size of an attention window under a config name that `AttentionPlan` does not know, 0 if there is none.

    The self-check's prompt must be longer than the window, or a model that counts the window in slots would pass.
    """
    known = ("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern")
    sizes = [v for k, v in target.config.to_dict().items() if "window" in k and k not in known]
    return max((v for v in sizes if isinstance(v, int) and not isinstance(v, bool)), default=0)


def _random_tokens(target: Target, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, shape, generator=generator).to(target.device)


@torch.no_grad()
def checked_tree_target(target: Target, compiles: bool = False, verdict: Path | None = None) -> TreeTarget:
    """The target through the tree kernel, which must give the logits of the model's own attention.

    verdict: see TreeTarget. Raises UnsupportedTarget if the kernel does not.
    """
    if target.dtype == torch.float64:
        raise UnsupportedTarget("the tree kernel does not support fp64")
    try:
        made = TreeTarget(target, compiles, verdict=verdict)
        tried = made if made.fused else TreeTarget(target)  # compiling layers for the check alone takes long
        gap = _tree_gap(target, tried.verify)
    except UnsupportedTarget:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UnsupportedTarget(f"the tree kernel fails: {type(error).__name__}: {reason}") from error
    if not gap <= tolerance(target.precision):
        raise UnsupportedTarget(f"the tree kernel gives other logits (difference {gap:.2g})")
    return made


def _tree_gap(target: Target, verify: Callable[..., tuple[Tensor, Tensor]]) -> float:
    """Difference between trees on two ragged prompts and each path alone, run by the model without redrafter."""
    prompt = min(PROMPT + hidden_window(target), target.max_positions - LENGTH - 1)
    lengths = [prompt, prompt - 5]
    tokens = _random_tokens(target, 2, prompt)
    last = _random_tokens(target, 2, 1)[:, 0]
    beam = _random_tokens(target, 2, WIDTH, LENGTH)
    beam[:, 1, : LENGTH - 1] = beam[:, 0, : LENGTH - 1]  # siblings, so a mask that shows a sibling is noticed
    tree, _ = pack_beam(beam, last)
    cache = KVCache(slots=prompt + tree.nodes + 1)
    target.prefill(tokens, lengths, cache, ())
    logits, _ = verify(tree, torch.tensor(lengths, device=target.device), cache, ())
    gap = 0.0
    if compiles_only():
        return gap
    for row, length in enumerate(lengths):
        for node in leaves(tree, row):
            path = tree.mask[row, node].nonzero()[:, 0]
            whole = torch.cat([tokens[row, :length], tree.tokens[row, path]])
            alone = target.model(input_ids=whole[None], use_cache=False).logits[0, length:].to(target.device)
            gap = max(gap, relative_gap(alone, logits[row, path]))
    return gap


def _batch_gap(target: Target) -> float:
    """A row's logits must not depend on how far along another row of the batch is."""
    tokens = _random_tokens(target, 2, 4)
    near = torch.arange(4, device=target.device)
    far = near + target.max_positions - 4
    visible = (near[:, None] >= near[None, :])[None]

    def run(rows: int, positions: Tensor) -> Tensor:
        slots = near.expand(rows, -1)
        mask, order = visible.expand(rows, -1, -1), TextPass([4] * rows, 0)
        logits, _ = target.forward(tokens[:rows], positions, slots, mask, positions, KVCache(slots=4), (), order=order)
        return logits[0]

    alone = run(1, near[None])
    beside = run(2, torch.stack([near, far]))
    return relative_gap(alone, beside)


def _far_gaps(target: Target) -> tuple[float, float]:
    """Four tokens at each of several positions, one row each: two differences that must be small.

    First, between redrafter's pass and the model's own without a KV cache. Second, between passes whose KV
    caches report different lengths. transformers' caches hold rows of one length, and a model may take its
    positions from that length; rows of redrafter's cache differ in length, so no single answer would be right.
    """
    far = target.max_positions - 4
    starts = [0, *(s for s in FAR_POSITIONS if s < far), far]
    near = torch.arange(4, device=target.device)
    slots = near.expand(len(starts), -1)
    positions = slots + torch.tensor(starts, device=target.device)[:, None]
    visible = (near[:, None] >= near).expand(len(starts), -1, -1)
    tokens = _random_tokens(target, len(starts), 4)
    masks = target.attention.masks(visible, positions, positions, target.dtype)

    def run(length: int) -> Tensor:
        cache = target.new_hf_cache(KVCache(slots=4), slots, 4, length, TextPass([4] * len(starts), 0))
        return target.run(tokens, positions, masks, cache, ())[0].flatten(0, 1)

    if target.scales:  # without a cache, such a model takes every text to begin at 0
        own = torch.cat([_after(target, tokens[i : i + 1], start) for i, start in enumerate(starts)])
    else:
        own = target.model(input_ids=tokens, position_ids=positions, use_cache=False).logits.to(target.device)
    first = run(0)
    return relative_gap(own.flatten(0, 1), first), max(relative_gap(first, run(length)) for length in starts[1:])


def _after(target: Target, tokens: Tensor, start: int) -> Tensor:
    """Logits of tokens (1, n), which see each other alone, by the bare model: its cache reports `start` tokens."""
    slots = torch.arange(tokens.shape[1], device=target.device)[None]
    visible = slots[:, :, None] >= slots[:, None]
    masks = target.attention.masks(visible, start + slots, start + slots, target.dtype)
    cache = target.new_hf_cache(KVCache(slots=tokens.shape[1]), slots, tokens.shape[1], start)
    out = target.model(input_ids=tokens, position_ids=start + slots, attention_mask=masks, past_key_values=cache)
    logits: Tensor = out.logits.to(target.device)
    return logits


def check_with_fallback(target: Target) -> None:
    """Check; if the attention implementation is what fails, try transformers' own eager one."""
    try:
        check(target)
    except UnsupportedTarget:
        implementation: Any = getattr(target.config, "_attn_implementation", None)
        if implementation in (None, "eager") or not hasattr(target.model, "set_attn_implementation"):
            raise
        use_attention(target, "eager")
        try:
            check(target)
        except UnsupportedTarget:
            target.release()
            raise
        log.info("%s cannot verify trees under %s attention; using eager", target.name, implementation)


def use_attention(target: Target, implementation: str) -> None:
    """Switch a model to another attention implementation until the target is released."""
    target.on_release(partial(target.model.set_attn_implementation, attention_implementations(target.model)))
    target.model.set_attn_implementation(implementation)
