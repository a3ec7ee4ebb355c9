"""Analysis of a profiler trace of decoding steps: kernels, stages and idle time of a step."""

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import profile

ATTENTION = ("_tree_attention", "newest_keys", "older_keys", "merge_parts")
PRODUCTS = ("_product", "gemm", "gemv", "nvjet", "cutlass", "splitk", "cublas")
Kernel = tuple[str, float, float]
"""Name, start and duration in microseconds."""


def by_name(steps: list[list[Kernel]]) -> dict[str, tuple[float, float]]:
    """Return microseconds and launches per step of each kernel name, the most expensive first."""
    spent: dict[str, list[float]] = {}
    for kernel in (k for s in steps for k in s):
        spent.setdefault(kernel[0][:80], []).append(kernel[2])
    most = sorted(spent.items(), key=lambda x: -sum(x[1]))[:30]
    return {name: (round(sum(v) / len(steps), 2), round(len(v) / len(steps), 1)) for name, v in most}


def split_steps(prof: profile) -> list[list[Kernel]]:
    """Split a trace into steps. A step ends with the copy of its result to the host."""
    events = sorted(
        (
            (e.name, float(e.time_range.start), float(e.time_range.elapsed_us()))
            for e in prof.events() or []  # type: ignore[no-untyped-call]
            if e.device_type == DeviceType.CUDA
        ),
        key=lambda k: k[1],
    )
    steps: list[list[Kernel]] = [[]]
    for event in events:
        if "DtoH" in event[0]:
            steps.append([])
        else:
            steps[-1].append(event)
    return steps


def busy_ms(kernels: list[Kernel]) -> float:
    """Return the milliseconds in which at least one kernel runs. Kernels may overlap."""
    busy, end = 0.0, 0.0
    for _, start, took in kernels:
        busy += max(0.0, start + took - max(start, end))
        end = max(end, start + took)
    return busy / 1e3


def stage_times(kernels: list[Kernel]) -> dict[str, float]:
    """Return the milliseconds of each stage, from its first kernel to that of the next stage.

    Stages are recognised by kernels that only one of them launches.
    """

    def places(*names: str) -> list[int]:
        return [i for i, kernel in enumerate(kernels) if kernel[0].startswith(names)]

    is_product = [any(p in k[0].lower() for p in PRODUCTS) for k in kernels]
    drafted = max(places("_choose"), default=-1) + 1
    verify = next((i for i in range(drafted, len(kernels)) if is_product[i]), drafted) if drafted else 0
    after = places(*ATTENTION)[-1] + 1
    commit = places("_commit")[-1]
    head = max(range(after, commit), key=lambda i: kernels[i][2])  # the output embedding: by far the longest there
    cuts = {"draft": 0, "pack": drafted, "verify": verify, "accept": head + 1, "commit": commit, "follow": commit + 1}
    times = [kernels[min(c, len(kernels) - 1)][1] for c in cuts.values()]
    times.append(kernels[-1][1] + kernels[-1][2])
    return {name: (b - a) / 1e3 for name, a, b in zip(cuts, times, times[1:], strict=False)}
