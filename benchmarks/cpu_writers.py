"""Programs that write the texts of benchmarks/cpu.py: redrafter, transformers' `generate` and llama.cpp."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import redrafter

Writer = Callable[[list[int], int], tuple[list[int], float, int]]
"""Token ids of a prompt, at most this many new tokens -> new tokens, seconds, steps."""

SPINNING = "GOMP_SPINCOUNT"
"""How long threads of redrafter wait actively. The commands set it; other programs keep their own default."""

LLAMA = """
import ctypes, json, sys, time
import llama_cpp as llama
path, threads, eos = sys.argv[1], int(sys.argv[2]), set(json.loads(sys.argv[3]))
if path.endswith(".q4_0"):  # quantise the file given before it
    settings = llama.llama_model_quantize_default_params()
    settings.ftype, settings.allow_requantize = llama.LLAMA_FTYPE_MOSTLY_Q4_0, True
    assert llama.llama_model_quantize(sys.argv[4].encode(), path.encode(), ctypes.byref(settings)) == 0
model = llama.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
context = model._ctx.ctx
greedy = llama.llama_sampler_init_greedy()
about = {"version": llama.__version__, "system_info": llama.llama_print_system_info().decode()}
print(json.dumps(about), flush=True)
for line in sys.stdin:
    ids, most = json.loads(line)
    began, tokens, new = time.perf_counter(), [], ids
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    while not tokens or (tokens[-1] not in eos and len(tokens) < most):
        for at in range(0, len(new), 512):
            part = new[at : at + 512]
            given = (llama.llama_token * len(part))(*part)
            assert llama.llama_decode(context, llama.llama_batch_get_one(given, len(part))) == 0
        tokens.append(llama.llama_sampler_sample(greedy, context, -1))
        new = tokens[-1:]
    print(json.dumps([tokens, time.perf_counter() - began]), flush=True)
"""
"""A process that reads prompts and writes texts, by llama.cpp's C functions: no other Python is in its times."""


def ours(engine: redrafter.Engine) -> Writer:
    def write(ids: list[int], most: int) -> tuple[list[int], float, int]:
        requests = engine.requests([ids], max_new_tokens=most)
        began = time.perf_counter()
        [done] = engine.complete(requests)
        return done.tokens, time.perf_counter() - began, done.stats.steps

    return write


def transformers_generate(model_folder: Path) -> Writer:
    """The same model in transformers, its weights in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    def write(ids: list[int], most: int) -> tuple[list[int], float, int]:
        given = torch.tensor([ids])
        settings: dict[str, Any] = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
        began = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(given, attention_mask=torch.ones_like(given), **settings)
        tokens = made[0, len(ids) :].tolist()
        return tokens, time.perf_counter() - began, len(tokens) - 1

    return write


class Llama:
    """llama.cpp in a process of its own, with the same file, or with a file in Q4_0 that it makes from the same."""

    def __init__(self, python: str, gguf: Path, eos: tuple[int, ...], q4_0: Path | None = None) -> None:
        command = [python, "-c", LLAMA, str(q4_0 or gguf), str(torch.get_num_threads()), json.dumps(eos), str(gguf)]
        own = {name: value for name, value in os.environ.items() if name != SPINNING}
        with tempfile.TemporaryFile("w+") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.child = subprocess.Popen(command, text=True, env=own, **pipes)
            assert self.child.stdin is not None
            assert self.child.stdout is not None
            self.stdin, self.stdout = self.child.stdin, self.child.stdout
            said = self.stdout.readline()
            if not said:
                self.child.wait()
                errors.seek(0)
                reason = (errors.read().strip().splitlines() or ["no reason given"])[-1]
                sys.exit(f"{python} cannot run llama-cpp-python on {gguf}: {reason}")
        self.about: dict[str, str] = json.loads(said)

    def __call__(self, ids: list[int], most: int) -> tuple[list[int], float, int]:
        self.stdin.write(json.dumps([ids, most]) + "\n")
        self.stdin.flush()
        tokens, seconds = json.loads(self.stdout.readline())
        return tokens, seconds, len(tokens) - 1

    def close(self) -> None:
        """End the process and wait for it."""
        self.stdin.close()
        self.child.wait(timeout=30)
