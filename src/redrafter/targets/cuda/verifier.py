"""Which pass recorded steps run: the tree kernel's or the model's own; and the bits of its logits."""

import logging
from typing import cast

import torch

from redrafter.errors import UnsupportedTarget
from redrafter.kernels import compile_kernels
from redrafter.targets import verdicts
from redrafter.targets.cuda.same_bits import same_bits
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.passes import PaddedPass, Pass
from redrafter.targets.selfcheck import checked_tree_target
from redrafter.targets.target import Target

log = logging.getLogger(__name__)


@torch.no_grad()
def verifier(target: Target, compiles: bool) -> Pass:
    """The pass by the tree kernel; or by the model's own attention, where the kernel cannot replace it.

    The kernels of both checks, this one and that of `has_same_bits`, are compiled at once.
    """
    known: dict[bool, Pass] = target.verifiers
    if compiles in known:
        return known[compiles]
    with target.timed("look for a kept verdict"):
        path = verdicts.bits_path(target, compiles)
    found = _passed_before(target, compiles) if verdicts.read(path) else None
    if found is not None:
        known[compiles] = found
    else:
        with target.timed("compile the passes' kernels"):
            compile_kernels(lambda: same_bits(checked_tree_target(target, compiles)), target.device)
        try:
            with target.timed("check the passes"):
                known[compiles] = checked_tree_target(target, compiles, path)
        except UnsupportedTarget as reason:
            log.info("%s is verified by its own attention (%s)", target.name, reason)
            known[compiles] = PaddedPass(target)
    return known[compiles]


def _passed_before(target: Target, compiles: bool) -> TreeTarget | None:
    """The target through the tree kernel, unchecked: it passed all checks before. None if it differs after all."""
    with target.timed("fuse the layers"):
        compile_kernels(lambda: TreeTarget(target, compiles), target.device)
        try:
            made = TreeTarget(target, compiles, same_bits=True)
        except Exception as error:
            log.debug("%s is checked again: %s", target.name, error)
            return None
    return made if made.fused else None


def has_same_bits(found: Pass) -> bool:
    """Whether a token's logits have the same bits in every pass.

    The first call tries the tree kernel's and keeps the verdict. Do not call this function while a CUDA graph is being
    recorded.
    """
    if found.same_bits is None:
        found = cast(TreeTarget, found)  # the only pass whose bits are not known beforehand
        try:
            with found.target.timed("compare bits"):
                found.same_bits = same_bits(found)
            if found.same_bits:
                verdicts.write(found.verdict, True)
        except Exception as error:  # of the model, the compiler, Triton or for lack of memory: decoding goes on without
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("the bits of %s cannot be compared (%s)", found.target.name, first)
            found.same_bits = False
    return bool(found.same_bits)
