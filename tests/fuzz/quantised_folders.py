"""Damaged folders of quantised models in every layout, loaded and run: started by test_quantised_folders.py."""

import contextlib
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from redrafter.core.cache import KVCache
from redrafter.targets import load_target
from tests.fuzz.cases import try_all
from tests.fuzz.drafter_folders import VALUES, edited, flipped
from tests.helpers.quantised import LAYOUTS, write_quantised
from tests.helpers.zoo import VOCAB

FILES = ("config.json", "model.safetensors")
KNOWN = (
    *("gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "gptq_v2", "gemm", "gemv", "float", "int", "group"),
    *("channel", "tensor", "token", "block", "pack-quantized", "int-quantized", "float-quantized", "static", "dynamic"),
    *("Linear", "re:.*q_proj", "re:.*", "q_proj", "e4m3", "ue8m0", -1, 4, 8, 16, [16, 16], [1, 16], [0, 16], [16, -16]),
)
"""Values that a configuration may have in some place."""


def damaged_config(data: bytes, rng: random.Random) -> bytes:
    """Most changes are in what it says of quantisation."""
    config = json.loads(data)
    if rng.random() < 0.2:
        return json.dumps(edited(config, rng)).encode()
    config["quantization_config"] = edited(config["quantization_config"], rng, KNOWN if rng.random() < 0.5 else VALUES)
    return json.dumps(config).encode()


def damaged_weights(data: bytes, rng: random.Random) -> bytes:
    """Parts of layers exchanged, renamed, of another type or shape; or bytes changed."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:begin]), bytearray(data[begin:])
    parts = [name for name in header if "_proj" in name]
    one, other = rng.choice(parts), rng.choice(parts)
    match rng.randrange(8):
        case 0:
            return flipped(data, rng, rng.choice((16, begin, len(data))))
        case 1:
            header[one], header[other] = header[other], header[one]
        case 2:
            del header[one]
        case 3:
            header[one]["dtype"] = rng.choice(("F32", "F16", "BF16", "I32", "I8", "U8", "F8_E4M3", "I64", "F8_E5M2"))
        case 4:
            header[one]["shape"] = rng.choice((header[one]["shape"][::-1], [*header[one]["shape"], 1], [], [1]))
        case 5 | 6:
            first, last = header[one]["data_offsets"]
            for _ in range(20):
                body[rng.randrange(first, last)] = rng.choice((0, 127, 252, 255, rng.randrange(256)))
        case _:
            header = edited(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def main(count: str) -> None:
    logging.disable()
    tokens = torch.arange(3)[None]

    def use(folder: Path) -> None:
        target: Any = load_target(folder, dtype="fp32", device="cpu")
        logits, _ = target.prefill(tokens, [3], KVCache(slots=3), ())
        assert logits.shape[-1] == VOCAB

    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        at, whole = Path(scratch, "damaged"), {}
        for layout in LAYOUTS:
            folder = write_quantised(Path(scratch, layout), layout)
            use(folder)  # each is good before it is damaged
            whole[layout] = [(folder / name).read_bytes() for name in FILES]
        at.mkdir()

        def case(rng: random.Random) -> str:
            layout = rng.choice(list(whole))
            config, weights = whole[layout]
            what = rng.choice(("config", "weights", "weights", "both"))
            (at / FILES[0]).write_bytes(config if what == "weights" else damaged_config(config, rng))
            (at / FILES[1]).write_bytes(weights if what == "config" else damaged_weights(weights, rng))
            use(at)
            return layout

        with contextlib.redirect_stdout(sys.__stdout__):
            try_all(int(count), case)
