"""Other engines that write the texts of benchmarks/cpu.py, each in a process of an interpreter that has the engine.

    python -m venv ENGINE && ENGINE/bin/pip install openvino-genai
    python -m venv ENGINE && ENGINE/bin/pip install ctranslate2 torch transformers
    python -m venv ENGINE && ENGINE/bin/pip install onnxruntime-genai onnx onnx_ir torch transformers

llama_cpp (llama-cpp-python, built for this machine) and openvino read the default model's GGUF file. llama_cpp_q4_0
reads a copy of the file in Q4_0, which llama.cpp repacks for wide vectors. ctranslate2 has no 4-bit format on a CPU and
rounds the weights to 8 bits. onnxruntime_genai rounds them to its own 4 bits. All of them round activations to 8 bits.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

SPINNING = "GOMP_SPINCOUNT"
"""How long threads of redrafter wait actively. The commands set it; other programs keep their own default."""

START = """
import json, os, sys, time
gguf, folder, scratch, threads, eos = *sys.argv[1:4], int(sys.argv[4]), json.loads(sys.argv[5])
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # converters print
"""
LOOP = """
print(json.dumps(about), file=answers, flush=True)
for line in sys.stdin:
    ids, most = json.loads(line)
    began = time.perf_counter()
    tokens = write(ids, most)
    print(json.dumps([tokens, time.perf_counter() - began]), file=answers, flush=True)
"""
Q4_0 = """
import ctypes
import llama_cpp as llama
settings = llama.llama_model_quantize_default_params()
settings.ftype, settings.allow_requantize = llama.LLAMA_FTYPE_MOSTLY_Q4_0, True
source, gguf = gguf, scratch + "/q4_0.gguf"
assert llama.llama_model_quantize(source.encode(), gguf.encode(), ctypes.byref(settings)) == 0
"""
LLAMA_CPP = """
import llama_cpp as llama
model = llama.Llama(gguf, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
context = model._ctx.ctx
greedy = llama.llama_sampler_init_greedy()
about = {"version": llama.__version__, "system_info": llama.llama_print_system_info().decode()}
def write(ids, most):  # by llama.cpp's C functions: no other Python is in its times
    tokens, new = [], ids
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    while not tokens or (tokens[-1] not in eos and len(tokens) < most):
        for at in range(0, len(new), 512):
            part = new[at : at + 512]
            given = (llama.llama_token * len(part))(*part)
            assert llama.llama_decode(context, llama.llama_batch_get_one(given, len(part))) == 0
        tokens.append(llama.llama_sampler_sample(greedy, context, -1))
        new = tokens[-1:]
    return tokens
"""
OPENVINO = """
import numpy, openvino, openvino_genai
own = openvino_genai.SchedulerConfig()
own.enable_prefix_caching = False  # a prompt that comes again is read again, as by the others
settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "scheduler_config": own}
model = openvino_genai.LLMPipeline(gguf, "CPU", **settings)
about = {"version": openvino_genai.__version__}
def write(ids, most):
    settings = openvino_genai.GenerationConfig(max_new_tokens=most, do_sample=False, stop_token_ids=set(eos))
    given = numpy.array([ids]), numpy.ones((1, len(ids)), int)
    found = model.generate(openvino_genai.TokenizedInputs(*map(openvino.Tensor, given)), settings)
    return list(found.tokens[0])
"""
CTRANSLATE2 = """
import ctranslate2
ctranslate2.converters.TransformersConverter(folder).convert(scratch + "/int8", quantization="int8")
model = ctranslate2.Generator(scratch + "/int8", device="cpu", inter_threads=1, intra_threads=threads)
with open(scratch + "/int8/vocabulary.json") as file:
    words = json.load(file)
about = {"version": ctranslate2.__version__, "compute_type": model.compute_type}
def write(ids, most):
    settings = {"include_prompt_in_result": False, "return_end_token": True}
    [found] = model.generate_batch([[words[i] for i in ids]], max_length=most, end_token=eos, **settings)
    return found.sequences_ids[0]
"""
ONNXRUNTIME_GENAI = """
import runpy
import onnxruntime_genai as genai
places = ["-i", folder, "-o", scratch + "/int4", "-c", scratch]
# 4: activations in 8 bits, its fastest products
sys.argv = ["builder", *places, "-p", "int4", "-e", "cpu", "--extra_options", "int4_accuracy_level=4"]
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
config = genai.Config(scratch + "/int4")
config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
model = genai.Model(config)
about = {"version": genai.__version__}
def write(ids, most):
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(ids) + most, do_sample=False)
    writer, tokens = genai.Generator(model, settings), []
    writer.append_tokens(ids)
    while not tokens or (tokens[-1] not in eos and len(tokens) < most):
        writer.generate_next_token()
        tokens.append(int(writer.get_next_tokens()[0]))
    return tokens
"""
ENGINES = {
    "llama_cpp": LLAMA_CPP,
    "llama_cpp_q4_0": Q4_0 + LLAMA_CPP,
    "openvino": OPENVINO,
    "ctranslate2": CTRANSLATE2,
    "onnxruntime_genai": ONNXRUNTIME_GENAI,
}
"""By name: Python that defines `about` and `write(ids, most)`."""


def named_python(text: str) -> tuple[str, str]:
    """A command-line word NAME=PYTHON."""
    name, _, python = text.partition("=")
    if name not in ENGINES or not python:
        raise argparse.ArgumentTypeError(f"expected NAME=PYTHON with NAME among {', '.join(ENGINES)}, got {text!r}")
    return name, python


class OtherEngine:
    """A `Writer` that asks a process of the interpreter `python`."""

    def __init__(self, name: str, python: str, gguf: Path, folder: Path, eos: tuple[int, ...]) -> None:
        self.name, self.scratch = name, tempfile.TemporaryDirectory()
        given = [str(gguf), str(folder), self.scratch.name, str(torch.get_num_threads()), json.dumps(eos)]
        ours = (SPINNING, "PYTHONPATH")
        env = {key: value for key, value in os.environ.items() if key not in ours}
        with tempfile.TemporaryFile("w+") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            try:
                command = [python, "-c", START + ENGINES[name] + LOOP, *given]
                self.child = subprocess.Popen(command, text=True, env=env, **pipes)
            except OSError as error:
                self.scratch.cleanup()
                sys.exit(f"{python} cannot be started ({error.strerror}): give the path of an interpreter with {name}")
            assert self.child.stdin is not None
            assert self.child.stdout is not None
            self.stdin, self.stdout = self.child.stdin, self.child.stdout
            said = self.stdout.readline()
            if not said:
                self.close()
                errors.seek(0)
                reason = (errors.read().strip().splitlines() or ["no reason given"])[-1]
                sys.exit(f"{python} cannot run {name}: {reason}")
        self.about: dict[str, str] = json.loads(said)

    def __call__(self, ids: list[int], most: int) -> tuple[list[int], float, int]:
        self.stdin.write(json.dumps([ids, most]) + "\n")
        self.stdin.flush()
        said = self.stdout.readline()
        if not said:
            sys.exit(f"{self.name} ended before its answer: try fewer engines, or run the engine alone")
        tokens, seconds = json.loads(said)
        return tokens, seconds, len(tokens) - 1

    def close(self) -> None:
        """End the process and wait for it."""
        self.stdin.close()
        self.stdout.close()
        self.child.wait(timeout=30)
        self.scratch.cleanup()
