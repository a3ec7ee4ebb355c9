"""How many threads the CPU's compiled functions use: one for each physical core, unless a number was asked for."""

import functools
import os
from pathlib import Path

import torch

from redrafter.bounds import check_value
from redrafter.config import Threads

TOPOLOGY = Path("/sys/devices/system/cpu")

_asked: int | None = None


def use_threads(count: int) -> None:
    """Use this many threads in this process, torch's own operations included."""
    global _asked
    check_value("threads", count, Threads)
    torch.set_num_threads(count)
    _asked = count


def thread_count() -> int:
    """torch's number of threads, but no more than there are physical cores unless that number was asked for."""
    now = torch.get_num_threads()
    return now if now == _asked else min(now, physical_cores())


@functools.cache
def physical_cores() -> int:
    """Cores that this process may run on. Two hardware threads of one core share its arithmetic units."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core(cpu) for cpu in usable}
    return max(len(cores), 1)


def _core(cpu: int) -> tuple[str, str]:
    """Names the core that a logical CPU belongs to. Without a description, each logical CPU counts as a core."""
    found = TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return (found / "physical_package_id").read_text().strip(), (found / "core_id").read_text().strip()
    except OSError:
        return "", str(cpu)
