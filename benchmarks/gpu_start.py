"""The start of speculative decoding in new processes, for benchmarks/gpu.py."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redrafter.cache_folder import cache_folder
from redrafter.targets.verdicts import folder as verdicts_folder


def time_starts(script: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run `script --only-start` twice: with empty caches of compiled code and verdicts, then with these.

    Return rows and headline.
    """
    rows, headline = [], {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        caches["REDRAFTER_CACHE"] = str(without_verdicts(Path(folder) / "redrafter"))
        for name in ("cold", "warm"):
            saved = Path(folder) / f"{name}.json"
            more = ["--only-start", "--save", str(saved)]
            subprocess.run([sys.executable, script, *words, *more], env=os.environ | caches, check=True)
            row = json.loads(saved.read_text())["rows"][0]
            rows.append(row | {"part": "start", "caches": name})
            headline[f"{name}_start_s"] = row["first_token_seconds"]
            headline[f"{name}_first_step_s"] = row["first_step_seconds"]
    return rows, headline


def without_verdicts(made: Path) -> Path:
    """A cache folder with links to all that the user's has, except kept verdicts."""
    made.mkdir()
    for path in cache_folder().iterdir() if cache_folder().exists() else ():
        if path != verdicts_folder():
            (made / path.name).symlink_to(path.resolve())
    return made
