"""The start of speculative decoding in new processes, for benchmarks/gpu.py."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def time_starts(script: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run `script --only-start` twice: with empty compiler caches, then with these. Return rows and headline."""
    rows, headline = [], {}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        for name in ("cold", "warm"):
            saved = Path(folder) / f"{name}.json"
            more = ["--only-start", "--save", str(saved)]
            subprocess.run([sys.executable, script, *words, *more], env=os.environ | caches, check=True)
            row = json.loads(saved.read_text())["rows"][0]
            rows.append(row | {"part": "start", "caches": name})
            headline[f"{name}_start_s"] = row["first_token_seconds"]
            headline[f"{name}_first_step_s"] = row["first_step_seconds"]
    return rows, headline
