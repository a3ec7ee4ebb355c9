"""Tries many hostile inputs in this process, and prints how each ended as one line of JSON."""

import faulthandler
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from redrafter.errors import RedrafterError

HANG = 30
"""Seconds after which a case hangs, on a slow machine under sanitizers."""


class Hang(BaseException):
    pass


def _hang(*_: Any) -> None:
    raise Hang


def memory() -> int:
    """The most memory that the process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def try_all(count: int, case: Callable[[random.Random], str]) -> None:
    """`case` makes an input, uses it and says in a word what it was; it may raise an error for users."""
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _hang)
    ends: Counter[str] = Counter()
    failed, slowest, before, began = [], 0.0, memory(), time.perf_counter()
    for number in range(count):
        print(f"case {number}", file=sys.stderr)  # the last line before a report says which it was
        start = time.perf_counter()
        signal.alarm(HANG)
        try:
            end = f"{case(random.Random(number))} used"
        except RedrafterError as error:
            end = "refused"
            if "\n" in str(error) or len(str(error)) > 1000:
                failed.append(f"case {number}: {error}")
        except Hang:
            failed.append(f"case {number} hangs")
        except Exception:
            failed.append(f"case {number}: {traceback.format_exc()[-1500:]}")
        finally:
            signal.alarm(0)
        ends[end] += 1
        slowest = max(slowest, time.perf_counter() - start)
    seconds = time.perf_counter() - began
    print(json.dumps({
        "cases": count, "ends": ends, "failed": failed, "slowest": round(slowest, 2), "seconds": round(seconds),
        "megabytes": memory(), "grown": memory() - before,
    }))  # fmt: skip
