"""The target's own answers to a question file, along which tokens/step are simulated."""

import time
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.common import first_turns
from redrafter.drafters import NoDrafter
from redrafter.engine import Engine
from redrafter.targets import Target
from redrafter.texts import Texts

BATCH = 16
GPU_BATCH = 80


def write_answers(
    target: Target, questions: Path, tokens: int, temperature: float, folder: Path, count: int = 10**6
) -> Texts:
    """Write answers to `count` questions by plain decoding, or read them if an earlier call wrote them to `folder`."""
    path = folder / f"answers-{temperature:g}.safetensors"
    if path.exists():
        return Texts(**load_file(path))
    engine = Engine(target, NoDrafter(), runtime="graphs")
    messages = first_turns(questions, count)
    requests = engine.requests(
        messages, max_new_tokens=tokens, seed=list(range(len(messages))), temperature=temperature
    )
    done = engine.complete(requests, rows=GPU_BATCH if target.device.type == "cuda" else BATCH)
    rows = [[*r.prompt, *c.tokens] for r, c in zip(requests, done, strict=True)]
    texts = Texts.of(rows, [len(r.prompt) for r in requests], [temperature] * len(rows), [r.seed for r in requests])
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may share the folder: rename the finished file into place.
    scratch = path.with_suffix(f".{time.time_ns()}")
    save_file({k: v for k, v in vars(texts).items() if v is not None}, scratch)
    scratch.replace(path)
    return texts
