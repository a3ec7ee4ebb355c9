"""Bulk writing: many plain texts through one running batch, for training data, where only the total matters.

Each text is the one `Engine.plain()` writes with the same seed.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from redrafter.drafters import NoDrafter
from redrafter.errors import OutOfMemory
from redrafter.runtime.batch import Batch
from redrafter.runtime.row import Request, Row
from redrafter.targets import Target

log = logging.getLogger(__name__)

STEPS = 8
"""Recorded steps in one launch. The host reads the results of a launch, and replaces rows that have finished, while the
GPU runs the next one."""


def write_texts(
    target: Target,
    requests: Sequence[Request],
    *,
    rows: int,
    progress: Callable[[int], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """New tokens of every request, its ending token included; `rows` at once, or half as many where memory is short.

    `check` is called before each pass; what it raises ends the writing.
    """
    if not requests:
        return []
    from redrafter.targets.cuda.grouped_attention import use_grouped_attention  # imports much of transformers

    rows = min(rows, len(requests))
    while True:
        try:
            with use_grouped_attention(target):
                return _write(target, requests, rows, progress or (lambda _: None), check)
        except (torch.OutOfMemoryError, OutOfMemory):
            if rows == 1:
                raise
        rows //= 2  # outside the handler: the failed attempt holds memory until then
        torch.cuda.empty_cache()
        log.info("out of memory: writing %d texts at once", rows)


def _write(
    target: Target,
    requests: Sequence[Request],
    rows: int,
    progress: Callable[[int], None],
    check: Callable[[], None],
) -> list[list[int]]:
    context = max(len(r.prompt) + r.max_new_tokens for r in requests)
    endings = max(len(r.eos) for r in requests)
    batch = Batch(target, NoDrafter(), rows=rows, context=context, shapes=(), endings=endings, one_size=True)
    texts: list[list[int]] = [[] for _ in requests]
    # Longest prompts first: prompts read together are about equally long, and no long text is left for the end.
    waiting = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    writing: dict[Row, int] = {}
    while waiting or writing:
        check()
        fresh = []
        while waiting and batch.free:
            index = waiting.pop()
            fresh.append(batch.open(requests[index], reuses=False))
            writing[fresh[-1]] = index
        batch.read_all(fresh)
        for row, output in [pair for result in batch.step(count=STEPS) for pair in result.rows]:
            if row not in writing:  # ended in an earlier step of the same results
                continue
            texts[writing[row]] += output.tokens
            if output.done:
                progress(len(texts[writing[row]]))
                batch.close(row)
                del writing[row]
    return texts
