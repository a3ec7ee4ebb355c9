"""Which rows of the running batch change places before a step, so that the step's rows are one view of its tensors."""

from collections.abc import Sequence

from redrafter.runtime.row import Row


def first_place(places: int, size: int, drafts: bool, beside: int) -> int:
    """Where a recorded step of `size` places begins: rows that draft stand at the low places, others at the high ones.

    Next to `beside` places of other rows of this kind where there is room, so that none of them has to move. There are
    few possible beginnings, since each is recorded.

    >>> [first_place(12, 2, drafts, beside) for drafts in (True, False) for beside in (0, 1, 4)]
    [0, 2, 4, 10, 8, 6]
    """
    offset = -(-beside // size) * size
    offset = offset if offset + size <= places else 0
    return offset if drafts else places - size - offset


def arrange(
    at: Sequence[Row | None], rows: Sequence[Row], size: int, start: int | None = None
) -> tuple[int, list[tuple[int, int]]]:
    """Swaps that bring these rows, and no other live row, into `size` places from `start` on.

    Without a start the places are those where the fewest rows are wrong. Returns the start and the pairs of places.
    """
    if start is None and max(row.place for row in rows) - (low := min(row.place for row in rows)) < size:
        return low, []  # as in most steps: the rows are neighbours already
    own = set(rows)
    live = [p for p, row in enumerate(at) if row is not None and row.live]
    if start is None:
        starts = range(len(at) - size + 1)
        start = min(starts, key=lambda s: sum((at[p] in own) != (s <= p < s + size) for p in live))
    inside = range(start, start + size)
    room = [p for p in inside if at[p] not in own]
    swaps = list(zip((p for p in live if at[p] in own and p not in inside), room, strict=False))
    after = list(at)
    for a, b in swaps:
        after[a], after[b] = after[b], after[a]
    crowded = [p for p in inside if (row := after[p]) is not None and row.live and row not in own]
    free = [p for p, row in enumerate(after) if p not in inside and (row is None or not row.live)]
    return start, swaps + list(zip(crowded, free, strict=False))
