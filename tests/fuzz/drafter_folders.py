"""Damaged drafter folders of every kind, loaded and used for a few tokens: run by test_drafter_folders.py."""

import contextlib
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from redrafter import Engine, Shape
from redrafter.drafters import NoDrafter, checkpoint, files
from redrafter.engine.resolve import resolve_drafter
from redrafter.kernels.cpu import library
from tests.drafters.test_hostile_folders import causal, write
from tests.fuzz.cases import try_all
from tests.helpers import sanitised
from tests.helpers.zoo import PROMPTS, VOCAB, recurrent_drafter
from tests.targets.cpu.test_packed import packed

FILES = (files.CONFIG_FILE, files.WEIGHTS_FILE)
COMPILED = {"state_size": 64, "exit_size": 96, "cell": "gated", "first_state": "context", "head": "tied",
            "normed": True, "memory_heads": 2, "memory_size": 32}  # fmt: skip
"""Of a drafter whose search is one C++ call."""
INDEXES = (-1, -VOCAB, VOCAB, VOCAB + 1, 49152, 2**31, 2**40, 10**12, 2**63 - 1, -(2**63))
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
VALUES = (
    *(0, 1, 2, 3, 7, 16, 24, 32, 33, 64, 2**16, 2**31 - 1, 2**31, 2**40, 10**12, 2**63 - 1, 2**64, 10**400, -1, -7),
    *(0.5, 1e308, float("nan"), float("inf"), True, False, None, "", "x", "\ud800", "x" * 5000, "1", "cuda"),
    *("rnn", "gated", "none", "own", "tied", "zero", "context", "embedding", "recurrent", "redrafter_eagle"),
    *([], [1], [-1, 1], [10**12], [-(10**12)], [[1]], {}, {"a": 1}, DEEP),
)
TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", "", 3)


def folders(target: Any, root: Path) -> dict[str, list[bytes]]:
    """The two files of a folder of each kind."""
    for kind in ("medusa", "eagle", "speculators", "recurrent"):
        write(root / kind, kind, target, draft_vocab_size=9)
    write(root / "apple", "apple", target)
    for storage in ("exact", "int8"):
        net = recurrent_drafter(target, draft_vocab_size=24, **COMPILED).net
        net.token_ids.copy_(torch.randperm(VOCAB)[:24])
        checkpoint.write(root / f"compiled {storage}", net, target, storage=storage)
    causal(root / "causal")
    return {folder.name: [(folder / name).read_bytes() for name in FILES] for folder in sorted(root.iterdir())}


def flipped(data: bytes, rng: random.Random, most: int) -> bytes:
    """A few bytes changed, left out or added among the first `most`."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(most, len(made)) or 1)
        match rng.randrange(6):
            case 0 | 1:
                made[at : at + 1] = bytes([rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))])
            case 2:
                made[at : at + 8] = rng.choice(INDEXES).to_bytes(8, "little", signed=True)
            case 3:
                del made[at : at + rng.randint(1, 9)]
            case 4:
                made[at:at] = rng.randbytes(rng.randint(1, 9))
            case 5 if rng.random() < 0.3:
                del made[at:]
    return bytes(made)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value of a JSON tree, as the object or list that holds it, and its key there."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [place for key in keys for place in ((tree, key), *places(tree[key]))]


def edited(tree: Any, rng: random.Random, values: tuple[Any, ...] = VALUES) -> Any:
    """A JSON tree with a few of its values exchanged, left out or doubled."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not (found := places(tree)):
            return rng.choice(values)
        holder, key = rng.choice(found)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(list(holder))] = holder[key]
            case 2 if isinstance(holder, list):
                holder.append(holder[key])
            case 3 if type(holder[key]) is int:
                holder[key] += rng.choice((-1, 1, 8, -holder[key], 2**32))
            case _:
                holder[key] = rng.choice(values)
    return tree


def damaged_config(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return flipped(data, rng, len(data))
    text = json.dumps(edited(json.loads(data), rng))
    if rng.random() < 0.1 and text[1:-1].strip():
        text = "{" + text[1:-1] + ", " + text[1:-1] + "}"
    return text.encode()


def damaged_weights(data: bytes, rng: random.Random) -> bytes:
    begin = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:begin]), bytearray(data[begin:])
    match rng.randrange(6):
        case 0:
            return flipped(data, rng, rng.choice((16, begin, len(data))))
        case 1 if "token_ids" in header:
            first, last = header["token_ids"]["data_offsets"]
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(first, last, 8)
                body[at : at + 8] = rng.choice((*INDEXES, rng.randrange(VOCAB))).to_bytes(8, "little", signed=True)
        case 2:
            at = rng.randrange(len(body))
            body[at : at + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff\xff\x7f\x7f", rng.randbytes(4)))
        case 3:
            entry = header[rng.choice([name for name in header if name != "__metadata__"])]
            entry["dtype"] = rng.choice(TYPES)
        case 4:
            one, other = (rng.choice(list(header)) for _ in range(2))
            header[one], header[other] = header[other], header[one]
        case _:
            header = edited(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def main(count: str, unchecked: str = "") -> None:
    """`unchecked`: token ids alone are damaged, and nothing checks them."""
    logging.disable()
    if unchecked:
        sanitised.use_unchecked()
        checkpoint.check_token_ids = lambda *_: None
    drafted: list[int] = []
    whole = library.loaded().run_draft

    def counted(*arguments: Any) -> int:
        drafted.append(1)
        return whole(*arguments)

    library.loaded().run_draft = counted
    target = packed("llama")
    prompts, options = PROMPTS[:2], ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3})
    more = {"max_new_tokens": 4, "ignore_eos": True}
    wanted = [[done.tokens for done in Engine(target, NoDrafter()).generate(prompts, **more, **how)] for how in options]
    with tempfile.TemporaryDirectory() as scratch:
        whole_files = folders(target, Path(scratch, "whole"))
        names = [name for name in whole_files if name != "causal"] * 5 + ["causal"]  # transformers takes its time

        def case(rng: random.Random) -> str:
            name, at = rng.choice(names), Path(scratch, "damaged")
            at.mkdir(exist_ok=True)
            for file, data in zip(FILES, whole_files[name], strict=True):
                (at / file).write_bytes(data)
            what = "token ids" if unchecked else rng.choice(("config", "weights", "weights", "both"))
            config, weights = whole_files[name]
            if what in ("config", "both"):
                (at / FILES[0]).write_bytes(damaged_config(config, rng))
            if what != "config":
                (at / FILES[1]).write_bytes(damaged_weights(weights, rng))
            drafter = resolve_drafter(str(at), target)
            for how, tokens in zip(options, wanted, strict=True):
                done = Engine(target, drafter, shape=Shape(width=2, length=2)).generate(prompts, **more, **how)
                assert [each.tokens for each in done] == tokens, "another text than plain decoding's"
            return name

        with contextlib.redirect_stdout(sys.stderr):
            for name in whole_files:  # each is good before it is damaged
                drafter = resolve_drafter(str(Path(scratch, "whole", name)), target)
                Engine(target, drafter, shape=Shape(width=2, length=2)).generate(prompts, **more)
        assert drafted, "the compiled search runs"
        try_all(int(count), case)
