"""Run the parts of a benchmark at once: each part is the same script in a process of its own, with its own results."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN = 15
"""Lines of a failed part's log that are printed."""


def run_at_once(
    script: str, words: Sequence[str], parts: Mapping[str, Sequence[object]], folder: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all parts in the order of `parts`, and the names of the parts that failed.

    `words` are the command line of this process; a part's own options follow, so that they win. FOLDER/PART.log and
    FOLDER/PART.json are the output and the results of a part. The processes share the CPU's cores evenly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // len(parts)))
    files = {name: folder / f"{name.replace(' ', '-')}.json" for name in parts}
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name, own in parts.items():
        files[name].unlink(missing_ok=True)
        options = [*map(str, own), "--save", str(files[name]), "--overwrite", "--no-at-once"]
        with files[name].with_suffix(".log").open("wb") as log:
            running[name] = subprocess.Popen(
                [sys.executable, script, *words, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"},
            )
    try:
        failed = _wait(running, {name: file.with_suffix(".log") for name, file in files.items()})
    finally:
        for process in running.values():
            process.kill()
    rows = [row for file in files.values() if file.exists() for row in json.loads(file.read_text())["rows"]]
    return rows, [name for name in parts if name in failed]


def _wait(running: dict[str, "subprocess.Popen[bytes]"], logs: Mapping[str, Path]) -> set[str]:
    """Wait for all processes; print at once which of them ended, and why one failed."""
    began, failed = time.perf_counter(), set()
    while running:
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            lines = logs[name].read_text(errors="replace").splitlines()
            seconds = f"{time.perf_counter() - began:.0f} s"
            if process.returncode:
                failed.add(name)
                print(seconds, f"FAILED {name}, see {logs[name]}", *lines[-SHOWN:], sep="\n", flush=True)
            else:
                print(seconds, f"done {name}", lines[-1] if lines else "", flush=True)
    return failed
