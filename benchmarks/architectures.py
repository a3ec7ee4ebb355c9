"""Every causal LM of the installed transformers: is its text, written with speculation, transformers' own?

    python benchmarks/architectures.py [--resume] [--only llama qwen3]

Each model is tiny and random, in fp64 where it can be. Greedy texts of five ragged prompts are written by transformers'
own `generate`, one prompt at a time, and by redrafter, all at once, with trees of a drafter that knows most of the text
and with n-grams. A worker process tries one model after the other; where it dies or takes too long, another takes its
place.

equal: all texts are the same. refused: redrafter says why it does not take the model. wrong: another text, or an error
after the model was taken. not_built: transformers does not run the tiny model, see
`benchmarks/tiny_configs.py`. fused and packed: see `faster_paths`.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/architectures.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import logging
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.errors import RedrafterError
from redrafter.results import check_new, here, write_results

PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3],
    [7],
    [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6],
    [2, 7, 1],
    [1, 6, 1, 8, 4, 3, 33, 41, 1, 6, 1, 8],
]
"""Most are longer than the windows and chunks of the tiny models."""
TOKENS = 16
SKILL = 0.75
RESULTS = ("equal", "refused", "wrong", "not_built")
LOADED = "loaded"  # what a worker says when transformers has run the model


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def own_texts(model: Any) -> list[list[int]]:
    """Greedy texts by transformers' own `generate`, one prompt at a time."""
    import torch

    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        texts.append(whole[0, len(prompt) :].tolist())
    return texts


def build(model_type: str) -> tuple[Any, list[list[int]]]:
    """A tiny model and its texts, in fp64 if it computes in it, else in fp32."""
    import torch

    from benchmarks.tiny_configs import tiny_model

    try:
        model = tiny_model(model_type, torch.float64)
        return model, own_texts(model)
    except RuntimeError:
        model = tiny_model(model_type, torch.float32)
        return model, own_texts(model)


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:240]


def judge(model_type: str, loaded: Any = lambda: None) -> dict[str, Any]:
    """Try one model -> its row of the results. `loaded()` is called when transformers has run it."""
    from redrafter.targets import load_target

    began = time.perf_counter()
    row: dict[str, Any] = {"model_type": model_type}
    try:
        model, texts = build(model_type)
    except Exception as error:
        return row | {"result": "not_built", "reason": one_line(error)}
    loaded()
    row["class"], row["dtype"] = type(model).__name__, str(model.dtype).removeprefix("torch.")
    try:
        row |= compared(load_target(model), texts)
        if row["result"] == "equal":
            row |= faster_paths(model_type)
    except RedrafterError as error:
        row |= {"result": "refused", "reason": str(error)}
    except Exception as error:
        row |= {"result": "wrong", "reason": one_line(error)}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def compared(target: Any, texts: list[list[int]]) -> dict[str, Any]:
    """Whether the texts that redrafter writes are these, and how many tokens a step with the oracle gave."""
    from benchmarks.oracle import OracleDrafter
    from benchmarks.tiny_configs import VOCAB
    from redrafter import Engine, Shape
    from redrafter.core.step import Drafter
    from redrafter.drafters import NgramDrafter

    shape = Shape(width=3, length=4)
    facts: dict[str, Any] = {}
    drafters: dict[str, Drafter] = {"oracle": OracleDrafter(PROMPTS, texts, SKILL, VOCAB), "ngram": NgramDrafter()}
    for name, drafter in drafters.items():
        done = Engine(target, drafter, shape=shape).generate(PROMPTS, max_new_tokens=TOKENS, ignore_eos=True)
        for i, (one, text) in enumerate(zip(done, texts, strict=True)):
            if one.tokens != text:
                at = next((j for j, (a, b) in enumerate(zip(one.tokens, text, strict=False)) if a != b), len(text))
                return facts | {"result": "wrong", "reason": f"{name}: text {i} differs at token {at}"}
        if name == "oracle":
            steps = sum(one.stats.steps for one in done)
            facts["tokens_per_step"] = round(sum(len(one.tokens) - 1 for one in done) / steps, 2)
    return facts | {"result": "equal"}


def faster_paths(model_type: str) -> dict[str, Any]:
    """Whether all layers have fused passes that give their own results (compared here in plain torch, at load on a GPU
    by the kernels), and whether the CPU's packed weights are for models of this type."""
    import torch

    from benchmarks.tiny_configs import tiny_model
    from redrafter.targets import Target
    from redrafter.targets.cpu.families import FAMILIES
    from redrafter.targets.cuda.tree_target import TreeTarget

    target = Target(tiny_model(model_type, torch.float32))
    try:
        fused = TreeTarget(target).fused
    except Exception:  # of whatever part of the model is another than it seems
        fused = False
    return {"fused": fused, "packed": target.config.model_type in FAMILIES}


def work(pipe: Connection) -> None:
    """The worker process: receives model types, sends what `judge` says."""
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    from redrafter import targets  # noqa: F401  imports what every model needs

    pipe.send(LOADED)
    while True:
        pipe.send(judge(pipe.recv(), lambda: pipe.send(LOADED)))


class Worker:
    """A process that may die."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other,), daemon=True)
        self.process.start()
        other.close()
        self.pipe.recv()  # its imports take longer than a model

    def judge(self, model_type: str, limit: float) -> dict[str, Any]:
        """As `judge`, within so many seconds for building and as many for the rest."""
        row: dict[str, Any] = {"model_type": model_type, "result": "not_built"}
        self.pipe.send(model_type)
        while self.pipe.poll(limit):
            try:
                answer = self.pipe.recv()
            except EOFError:
                return row | {"reason": "the process died"}
            if answer != LOADED:
                return dict(answer)
            row["result"] = "wrong"
        return row | {"reason": f"it takes more than {limit:g} seconds"}

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def smoke(_: TinyFiles) -> list[object]:
    return ["--only", "llama", "rwkv"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types of transformers (default: all)")
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="seconds for a model (default 60)")
    parser.add_argument("--resume", action="store_true", help="try only what the results file lacks")
    default = Path(__file__).parent / "results" / "architectures.json"
    parser.add_argument("--save", type=Path, default=default, help="path of the results (JSON)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing results")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite or args.resume)
    kept = json.loads(args.save.read_text())["rows"] if args.resume and args.save.exists() else []
    rows = {row["model_type"]: row for row in kept}
    left = [name for name in args.only or model_types() if name not in rows]
    facts, worker = here(), Worker()
    for i, name in enumerate(left):
        row = rows[name] = worker.judge(name, args.limit)
        print(f"{i + 1}/{len(left)} {name}: {row['result']} {row.get('reason', '')}", flush=True)
        if "class" not in row and row.get("reason", "").startswith(("the process", "it takes")):
            worker.end()
            worker = Worker()
        counts = Counter(row["result"] for row in rows.values())
        write_results(args.save, {name: counts[name] for name in RESULTS}, sorted_rows(rows), facts)
    worker.end()
    print({name: sum(row["result"] == name for row in rows.values()) for name in RESULTS})


def sorted_rows(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[name] for name in sorted(rows)]


if __name__ == "__main__":
    main()
