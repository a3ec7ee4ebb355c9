"""Which pass verifies trees in recorded steps: the tree kernel's, or the model's own."""

import logging

from redrafter.errors import UnsupportedTarget
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.selfcheck import check_tree_kernel
from redrafter.targets.target import Target

log = logging.getLogger(__name__)


def verifier(target: Target, compiles: bool) -> Target | TreeTarget:
    """The target through the tree kernel; or the target itself, where the kernel does not do its attention."""
    known: dict[bool, Target | TreeTarget] = target.verifiers
    if compiles not in known:
        try:
            check_tree_kernel(target)
            known[compiles] = TreeTarget(target, compiles)
        except UnsupportedTarget as reason:
            log.info("%s is verified by its own attention (%s)", target.name, reason)
            known[compiles] = target
    return known[compiles]
