"""Wrong arguments of every public function and setting: each call is answered, or refused in one line."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants

import redrafter
from redrafter import Engine, Gamma, Grammar, RecurrentConfig, RuleConfig, SamplingParams, Shape, custom_generate
from redrafter.drafters import EagleConfig, MedusaConfig, ModelDrafter, NgramDrafter, WithNgrams
from redrafter.drafters.options import DrafterOptions
from redrafter.engine.request import Request
from redrafter.engine.speech import Transcriber
from redrafter.errors import RedrafterError
from redrafter.targets import load_target
from redrafter.train.config import DistillConfig, TrainConfig
from redrafter.train.distill import distill
from redrafter.train.trainer import train
from redrafter.tuning.at_rest import tune
from tests.helpers import whispers
from tests.helpers.letters import SMALL, make_target, tokenizer
from tests.helpers.toys import CONFIG, OPTIONS, make_texts
from tests.helpers.zoo import VOCAB, make_model, recurrent_drafter

CASES = 3000
SECONDS = 20.0
"""What one call may take; most take milliseconds."""
PROMPT = [1, 2, 3, 4]
CHAT = [{"role": "user", "content": "abc"}]


FUNCTIONS = ("halts", "progress")
"""What a function of the user raises is not caught: wrong ones are no functions."""


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not shown")


class Reached(Exception):
    """The arguments were accepted and the work begins."""


def reached(*_: object) -> None:
    raise Reached


def plain_values() -> list[Any]:
    """Numbers, texts, tensors and objects; most fit nowhere."""
    numbers = [0, 1, 2, 3, -1, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, True, False]
    numbers += [0.0, -0.0, 0.5, 1.0, 1.5, -1.5, 1e-320, 1e-40, 1e30, 1e39, 1e308, math.nan, math.inf, -math.inf, 1j]
    texts = ["", "5", "x", "a" * 5000, "\ud800", "\0", "two\nlines", "auto", "ngram", "none", "3x2", "3x2:4", "q8"]
    texts += ["0x0", "9" * 5000, "cuda:99", "meta", "fp16", "int8", "../..", "a/b", "*", "heuristic:-1", "confidence:x"]
    arrays = [torch.tensor(5), torch.tensor([1, 2]), torch.tensor([0.5, math.nan]), torch.zeros(2, 2), torch.zeros(0)]
    arrays += [torch.tensor([1]).to("meta"), torch.eye(2).to_sparse(), torch.tensor([True]), torch.tensor([1j])]
    arrays += [np.array([1, 2]), np.array(["a"]), np.array([None, 1], dtype=object), np.zeros((0, 3)), np.int64(3)]
    arrays += [np.float32("nan"), np.float16(0.5), np.array(7), np.bool_(True), np.datetime64("2026-01-01")]
    others = [None, b"ab", bytearray(b"ab"), memoryview(b"ab"), object(), Unshowable(), Unshowable, len, reached]
    others += [Shape(width=2, length=2), RuleConfig(), Gamma(), SamplingParams(), Grammar.choices(["a", "b"]), Path()]
    others += [NgramDrafter(), NgramDrafter, torch.float16, torch.int8, torch.nn.Linear(1, 1), range(3), iter([1, 2])]
    return numbers + texts + arrays + others


def odd(rng: random.Random, values: list[Any], depth: int = 0) -> Any:
    """One of the values, or a list, a tuple, a set or a mapping of some."""
    if depth == 2 or rng.random() < 0.7:
        return rng.choice(values)
    some = [odd(rng, values, depth + 1) for _ in range(rng.randrange(3))]
    keys: list[Any] = [
        v for v in (0, 1, -1, VOCAB, 2**63, "role", "content", "a", None, 0.5, True) if rng.random() < 0.3
    ]
    match rng.randrange(4):
        case 0:
            return some
        case 1:
            return tuple(some)
        case 2:
            return set(keys)
    return {key: odd(rng, values, depth + 1) for key in keys}


@dataclass(frozen=True)
class Called:
    """A public function with arguments that are right, and further ones that it takes."""

    function: Callable[..., Any]
    right: dict[str, Any]
    more: tuple[str, ...] = ()

    def mutated(self, rng: random.Random, values: list[Any]) -> dict[str, Any]:
        names = [*self.right, *self.more]
        changed = {name: odd(rng, values) for name in rng.sample(names, min(len(names), rng.randint(1, 2)))}
        changed = {key: value for key, value in changed.items() if key not in FUNCTIONS or not callable(value)}
        return self.right | changed


def setting(cls: Any, **right: Any) -> Called:
    return Called(cls, right, tuple(field.name for field in fields(cls) if field.init))


def functions(folder: Path) -> dict[str, Called]:
    """All that a program calls: the engine on a tiny model, settings, training, tuning, speech."""
    target = make_target()
    model = make_model(dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    engine = Engine(target, recurrent_drafter(target), shape=Shape(width=2, length=2))
    small = load_target(make_model("qwen2"), tokenizer=target.tokenizer)
    texts = make_texts(target, count=8, length=8)
    whisper = whispers.make_target()
    transcriber = Transcriber(whisper, NgramDrafter())
    sampling = tuple(field.name for field in fields(SamplingParams))
    asked = (
        "batch_size",
        "logits_processor",
        "seed",
        "n",
        "stop",
        "ignore_eos",
        "halts",
        "grammar",
        "shown",
        *sampling,
    )
    how = ("shape", "rule", "runtime", "exact")

    sizes = {"vocab_size": 9, "context_size": 8, "embedding_size": 8, "exit_size": 8}

    def request(**options: Any) -> Any:
        return engine.complete([Request(**options)])

    def stream(prompts: Any, **options: Any) -> Any:
        return list(engine.stream(prompts, **options))

    def generate(**options: Any) -> Any:
        return model.generate(torch.tensor([PROMPT]), max_new_tokens=2, custom_generate=custom_generate, **options)

    return {
        "generate": Called(engine.generate, {"prompts": PROMPT, "max_new_tokens": 2}, asked),
        "generate many": Called(engine.generate, {"prompts": [PROMPT, "abc", CHAT], "max_new_tokens": 2}, asked),
        "stream": Called(stream, {"prompts": "abc", "max_new_tokens": 2}, asked[1:]),
        "encode": Called(engine.encode, {"prompt": CHAT}, ("tools", "add_generation_prompt", "continue_final_message")),
        "message": Called(
            lambda **message: engine.encode([message]), {"role": "user", "content": "abc"}, ("tool_calls",)
        ),
        "complete": Called(engine.complete, {"requests": []}, ("processors", "rows")),
        "Request": Called(
            request, {"prompt": PROMPT, "max_new_tokens": 2, "seed": 0}, ("sampling", "eos", "stop", "pads")
        ),
        "Engine": Called(Engine, {"target": target, "drafter": NgramDrafter()}, (*how, "adapts")),
        "load": Called(redrafter.load, {"model": model, "drafter": "ngram"}, (*how, "gamma", "tokenizer", "device")),
        "load a folder": Called(
            redrafter.load,
            {"model": str(folder / "model"), "drafter": "ngram"},
            (*how, "gamma", "tokenizer", "dtype", "device", "kv_dtype", "activations"),
        ),
        "load_target": Called(load_target, {"model": str(folder / "model")}, ("tokenizer", "dtype", "device")),
        "custom_generate": Called(generate, {"drafter": "ngram"}, ("shape", "rule", "seed", "stream_to")),
        "SamplingParams": setting(SamplingParams),
        "Shape": setting(Shape),
        "Shape.of": Called(Shape.of, {"given": "3x2"}),
        "RuleConfig": setting(RuleConfig),
        "Gamma": setting(Gamma),
        "Gamma.of": Called(Gamma.of, {"text": "heuristic:3"}),
        "Grammar": Called(Grammar, {"kind": "regex", "text": "a"}),
        "Grammar.of": Called(Grammar.of, {"given": {"type": "object"}}),
        "Grammar.json_schema": Called(Grammar.json_schema, {"schema": {"type": "object"}}),
        "Grammar.regex": Called(Grammar.regex, {"pattern": "a+"}),
        "Grammar.lark": Called(Grammar.lark, {"text": 'start: "a"'}),
        "Grammar.choices": Called(Grammar.choices, {"texts": ["a", "b"]}),
        "RecurrentConfig": setting(RecurrentConfig, **sizes, state_size=8),
        "MedusaConfig": setting(MedusaConfig, **sizes),
        "EagleConfig": setting(EagleConfig, **sizes, heads=2),
        "DrafterOptions": setting(DrafterOptions),
        "TrainConfig": setting(TrainConfig),
        "DistillConfig": setting(DistillConfig),
        "NgramDrafter": Called(NgramDrafter, {"longest": 4, "shortest": 2}),
        "ModelDrafter": Called(ModelDrafter, {"model": small, "target": target}, ("gamma",)),
        "WithNgrams": Called(WithNgrams, {"inner": recurrent_drafter(target)}),
        "tune": Called(
            tune, {"engine": engine, "progress": reached}, ("row_counts", "temperature", "prompts", "tokens")
        ),
        "train": Called(
            train,
            {"target": target, "texts": texts, "folder": folder / "run", "options": OPTIONS, "config": CONFIG},
            ("shape", "init_from", "watcher"),
        ),
        "distill": Called(
            distill,
            {"target": target, "folder": folder / "data", "config": SMALL, "prompts": ["abc", "d"]},
            ("self_prompt", "documents", "progress", "clock"),
        ),
        "Transcriber": Called(Transcriber, {"target": whisper, "drafter": NgramDrafter()}, ("shape", "rule", "gamma")),
        "transcribe": Called(
            transcriber.transcribe,
            {"recordings": whispers.sounds(0.1)},
            ("batch_size", "temperature", "seed", "progress"),
        ),
    }


@pytest.mark.fuzz
def test_library_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # or each unknown name is looked for on the Hub
    rng, called, values = random.Random(10), functions(tmp_path), plain_values()
    ends, failed, slowest = Counter[str](), list[str](), 0.0
    for case in range(CASES):
        name = list(called)[case % len(called)]
        given = called[name].mutated(rng, values)
        changed = {key: value for key, value in given.items() if value is not called[name].right.get(key)}
        began = time.perf_counter()
        try:
            called[name].function(**given)
            end = "answered"
        except Reached:
            end = "answered"
        except RedrafterError as error:
            end = "refused"
            if "\n" in str(error) or len(str(error)) > 500:
                failed.append(f"case {case}, {name}: {str(error)!r}")
        except Exception as error:
            end = "failed"
            failed.append(f"case {case}, {name}: {type(error).__name__} {error} of {shown(changed)}"[:400])
        ends[end] += 1
        seconds = time.perf_counter() - began
        slowest = max(slowest, seconds)
        if seconds > SECONDS:
            failed.append(f"case {case}, {name}: {seconds:.1f} s for {shown(changed)}"[:400])
    print(f"\n{CASES} calls of {len(called)} functions: {dict(ends)}; slowest {slowest:.1f} s")
    assert not failed, "\n".join(failed)
    assert ends["refused"] > CASES / 2
    assert ends["answered"] > CASES / 50


def shown(changed: dict[str, Any]) -> str:
    try:
        return repr(changed)
    except RuntimeError:
        return f"{list(changed)}, one of which cannot be shown"
