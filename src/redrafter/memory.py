"""What fits into memory: the bytes that are free on a device, and the refusal of what needs more."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from redrafter.errors import OutOfMemory

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")


def require_room(what: str, needed: Mapping[str, float], device: torch.device, advice: str) -> None:
    """Raise OutOfMemory if the bytes `needed` for each purpose are together more than what is free."""
    free = free_bytes(device)
    if sum(needed.values()) > free:
        parts = ", ".join(f"{gib(size)} for {purpose}" for purpose, size in needed.items() if size)
        raise OutOfMemory(f"{what} need {parts}; {gib(free)} are free on {device.type}: {advice}")


def gib(size: float) -> str:
    """
    >>> gib(3 * 2**29), gib(2**50)
    ('1.5 GiB', '1,048,576.0 GiB')
    """
    return f"{size / 2**30:,.1f} GiB"


def free_bytes(device: torch.device) -> float:
    """Bytes that can still be allocated; infinite where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_machine(), _container()) if device.type == "cpu" else math.inf


def _machine() -> float:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return math.inf
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)


def _container() -> float:
    """What is left of the limit of a container; the cache of files counts as free."""
    try:
        limit = (CONTAINER / "memory.max").read_text().strip()
        used = int((CONTAINER / "memory.current").read_text())
        numbers = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit == "max" else float(int(limit) - used + int(numbers.get("inactive_file", 0)))
