"""Speculative decoding on a CPU against plain decoding, transformers' `generate` and llama.cpp, taking turns.

    python benchmarks/cpu.py --llama PYTHON

The prompts are MT-Bench's first turns, at temperature 0, one text at a time. All contenders write a text before any
writes the next, for several rounds, so that other load on the machine affects them alike. Ratios are of ms per token:
the median of each text over the rounds, averaged over texts. PYTHON is an interpreter with llama-cpp-python, which
reads the GGUF file that the default model was converted from. Its weights are the same in 4 bits, but its arithmetic
differs, so its texts are not compared.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/cpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import redrafter
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.kernels.cpu import ops
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.targets.default import default_model, find_gguf

Writer = Callable[[list[int]], tuple[list[int], float, int]]
"""Token ids of a prompt -> new tokens, seconds, steps."""

LLAMA = """
import json, sys, time
from llama_cpp import Llama
path, threads, most, eos = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), set(json.loads(sys.argv[4]))
llm = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
print("ready", flush=True)
for line in sys.stdin:
    began, tokens = time.perf_counter(), []
    llm.reset()  # else a repeated prompt would be cached
    for token in llm.generate(json.loads(line), temp=0.0, top_k=1, repeat_penalty=1.0):
        tokens.append(token)
        if token in eos or len(tokens) == most:
            break
    print(json.dumps([tokens, time.perf_counter() - began]), flush=True)
"""


def ours(engine: redrafter.Engine, most: int) -> Writer:
    def write(ids: list[int]) -> tuple[list[int], float, int]:
        requests = engine.requests([ids], max_new_tokens=most)
        began = time.perf_counter()
        [done] = engine.complete(requests)
        return done.tokens, time.perf_counter() - began, done.stats.steps

    return write


def transformers_generate(model_folder: Path, most: int) -> Writer:
    """Load the same model with transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def write(ids: list[int]) -> tuple[list[int], float, int]:
        given = torch.tensor([ids])
        began = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=most, do_sample=False, pad_token_id=0
            )
        tokens = made[0, len(ids) :].tolist()
        return tokens, time.perf_counter() - began, len(tokens) - 1

    return write


def llama(python: str, most: int, eos: tuple[int, ...]) -> Writer:
    """Start llama.cpp in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        path = find_gguf(Path(scratch))
    threads = str(torch.get_num_threads())
    command = [python, "-c", LLAMA, str(path), threads, str(most), json.dumps(list(eos))]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    if child.stdout.readline().strip() != "ready":
        sys.exit(f"{python} cannot run llama-cpp-python on {path}")

    def write(ids: list[int]) -> tuple[list[int], float, int]:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(ids) + "\n")
        child.stdin.flush()
        tokens, seconds = json.loads(child.stdout.readline())
        return tokens, seconds, len(tokens) - 1

    return write


@torch.no_grad()
def products(model: Any, rounds: int) -> list[dict[str, Any]]:
    """Time all matrix products of the model for n tokens: our kernels, torch, and a sum over as many bytes."""
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    size = sum(w.numel() * w.element_size() for w in weights)
    flat = torch.ones(size // 4)
    rows = []
    for n in (1, 2, 4, 6, 8, 12, 16):
        x = {w.shape[1]: torch.randn(n, w.shape[1]) for w in weights}

        def native(x: dict[int, torch.Tensor] = x) -> None:
            for w in weights:
                ops.linear(x[w.shape[1]], w)

        def own(x: dict[int, torch.Tensor] = x) -> None:
            for w in weights:
                F.linear(x[w.shape[1]], w)

        taken: dict[str, list[float]] = {"ours": [], "torch": [], "sum": []}
        for _ in range(rounds + 1):
            for name, run in (("ours", native), ("torch", own), ("sum", flat.sum)):
                began = time.perf_counter()
                run()
                taken[name].append(1e3 * (time.perf_counter() - began))
        best = {name: min(each[1:]) for name, each in taken.items()}
        row = {"kind": "products", "n": n, "bytes": size} | {f"{k}_ms": round(v, 2) for k, v in best.items()}
        rows.append(row | {"read_gb_s": round(size / best["sum"] / 1e6, 1), "of_read": best["sum"] / best["ours"]})
        print(row, flush=True)
    return rows


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--drafter", tiny.drafter, "--questions", tiny.questions]
    return [*words, "--prompts", 1, "--tokens", 4, "--rounds", 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "cpu.json")
    parser.add_argument("--prompts", type=int, default=16, help="number of questions, spread over the categories")
    parser.add_argument("--tokens", type=int, default=128, help="at most this many new tokens per text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", type=Shape.of, help="WxL:N (default: the drafter's own)")
    parser.add_argument("--llama", metavar="PYTHON", help="interpreter with llama-cpp-python")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="auto")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    engine = redrafter.load(args.model, args.drafter, device="cpu", shape=args.shape)
    writers: dict[str, Writer] = {
        "speculative": ours(engine, args.tokens),
        "plain": ours(engine.plain(), args.tokens),
        "transformers": transformers_generate(args.model or default_model(), args.tokens),
    }
    if args.llama:
        writers["llama_cpp"] = llama(args.llama, args.tokens, engine.eos_tokens())
    questions = read_questions(args.questions, args.prompts)
    prompts = [engine.encode([{"role": "user", "content": q.text}]) for q in questions]
    for write in writers.values():
        write(prompts[0])
    taken: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in writers}
    texts: dict[str, dict[int, list[int]]] = {name: {} for name in writers}
    steps = [0] * len(prompts)
    for turn in range(args.rounds):
        for i, ids in enumerate(prompts):
            for name, write in writers.items():
                tokens, seconds, count = write(ids)
                taken[name][i].append(1e3 * seconds / len(tokens))
                same = texts[name].setdefault(i, tokens) == tokens
                assert same, f"{name} wrote two texts for prompt {i}"
                if name == "speculative":
                    steps[i] = count
        so_far = {name: statistics.fmean(statistics.median(t) for t in each) for name, each in taken.items()}
        print(turn + 1, {name: round(ms, 2) for name, ms in so_far.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    for i, question in enumerate(questions):
        written = texts["speculative"][i]
        rows.append(
            {
                "kind": "text",
                "category": question.category,
                "shape": engine.shape.label,
                "tokens": len(written),
                "tokens_per_step": (len(written) - 1) / max(1, steps[i]),
                "equal": all(texts[name][i] == written for name in ("plain", "transformers")),
                "ms_per_token": {name: [round(ms, 3) for ms in each[i]] for name, each in taken.items()},
            }
        )
    own = so_far["speculative"]
    headline = {"equal": float(sum(r["equal"] for r in rows)), "texts": float(len(rows))}
    headline["tokens_per_step"] = sum(r["tokens"] - 1 for r in rows) / sum(steps)
    headline |= {f"ms_{name}": round(ms, 3) for name, ms in so_far.items()}
    names = {"plain": "vs_own_plain", "transformers": "vs_transformers", "llama_cpp": "vs_llama_cpp"}
    headline |= {names[name]: round(ms / own, 3) for name, ms in so_far.items() if name in names}
    rows.append({"kind": "setting", "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"), "load": os.getloadavg()})
    if ops.available():
        rows += products(engine.target.model, args.rounds + 2)
    write_results(args.save, headline, rows)
    print(headline)


if __name__ == "__main__":
    main()
