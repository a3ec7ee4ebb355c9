"""What the CPU's compiled functions make of fixed inputs: `python -m tests.helpers.cpu_results FILE.npz`.

Inputs come from numpy's integers, so they have the same bits on every machine.
"""

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from redrafter.core.flat import Piece, of_pieces
from redrafter.kernels.cpu import library, ops
from redrafter.kernels.cpu.draft import DraftModel
from redrafter.kernels.cpu.matrices import Floats, Quantised
from redrafter.kernels.cpu.model import GELU, SCALE_BYTES, SILU, LayerWeights, PassModel, Sizes, shapes_of
from redrafter.kernels.cpu.packed import PackedMatrix, quantise

RNG = np.random.default_rng(0)
VOCAB = 70
COUNTS = (1, 2, 3, 4, 5, 7, 8, 19)
"""Tokens of a product: every size of a block."""
BLOCKS = (9, 16, 33, 130)
"""And of AMX's."""


def floats(*shape: int, rng: np.random.Generator = RNG) -> np.ndarray:
    """Numbers of 24 bits from -1 to 1."""
    return (rng.integers(-(2**23), 2**23, shape) / 2**23).astype(np.float32)


def tensor(*shape: int) -> Tensor:
    return torch.from_numpy(floats(*shape))


def matrices(rows: int, columns: int, rng: np.random.Generator = RNG) -> list[Quantised | Floats]:
    """One of every format, in the order of FORMATS. Values reach both ends of their range."""
    nibbles = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    octets = rng.integers(-128, 128, (rows, columns), dtype=np.int8)
    numbers, half, single = floats(rows, columns, rng=rng), np.float16, np.float32

    def some(kind: type, group: int = 32) -> np.ndarray:
        return floats(rows, columns // group, rng=rng).astype(kind)

    return [
        Quantised(4, nibbles, some(half), some(half)),
        Quantised(4, nibbles, some(single), some(single)),
        Quantised(4, nibbles, some(half), zero=8),
        Quantised(8, octets, some(half)),
        Quantised(8, octets, some(half), some(half)),
        Quantised(8, octets, some(single), some(single)),
        Quantised(8, octets, some(single, 16)),
        Floats(numbers),
        Floats(numbers.astype(half)),
        Floats((numbers.view(np.uint32) >> 16).astype(np.uint16)),
    ]


Results = Iterator[tuple[str, Tensor | np.ndarray]]


def products() -> Results:
    for name, matrix in zip(library.FORMATS, matrices(37, 96), strict=True):
        packed = PackedMatrix(matrix)
        yield f"rows of {name}", packed.take(torch.arange(37))
        for n in COUNTS:
            x = tensor(n, 96) * 3
            for bits in (0, 8, 16):
                yield f"{n} times {name}, {bits} bits", packed.multiply(x, bits=bits)
        for n in BLOCKS:
            x = tensor(n, 96) * 3
            x[0, 5], x[1, 40], x[2, :32] = torch.nan, torch.inf, 1e-30
            yield f"{n} times {name}, 16 bits, NaN among them", packed.multiply(x, bits=16)
    extreme = np.concatenate([floats(40, 128) * 10.0**power for power in (-6, 0, 3)]).astype(np.float32)
    for bits in (4, 8):
        made = quantise(extreme, bits)  # type: ignore[arg-type]
        for part in ("values", "scales", "minimums"):
            if getattr(made, part) is not None:
                yield f"quantised to {bits} bits: {part}", getattr(made, part)


def layers() -> Results:
    for size, out in ((576, 192), (1, 1), (7, 5), (33, 50), (129, 70)):
        weight, bias = tensor(out, size), tensor(out)
        gate, up, down = tensor(out, size), tensor(out, size), tensor(size, out)
        for n in (1, 2, 3, 4, 6, 7, 16):
            x, name = tensor(n, size) * 4, f"{n} times {size} to {out}"
            yield f"linear, {name}", ops.linear(x, weight, bias)
            yield f"gated, {name}", ops.gated(x, gate, up, down)
            yield f"norm, {name}", ops.rms_norm(x, tensor(size), 1.0, 1e-5)
            for i, made in enumerate(ops.linear3(x, [(weight, bias), (gate, None), (up, bias)])):
                yield f"linear3, {name}, {i}", made
    yield "random numbers", ops.uniform(torch.tensor([3, -7, 2**62]), 5003)


def attention() -> Results:
    heads, kv_heads, extent = 6, 2, 60
    for size in (16, 48, 64, 128):
        for batch, n in ((1, 1), (2, 5), (1, 16)):
            q, cos, sin = tensor(batch, n, heads * size) * 3, tensor(batch, n, size), tensor(batch, n, size)
            k, v = tensor(batch, n, kv_heads * size), tensor(batch, n, kv_heads * size)
            keys, values = tensor(batch, kv_heads, 75, size), tensor(batch, kv_heads, 75, size)
            ops.rotate_and_store(q, k, v, cos, sin, (20 + torch.arange(n)).expand(batch, n).contiguous(), keys, values)
            hidden = torch.from_numpy(RNG.random((batch, 1, n, extent)) < 0.4)
            hidden[..., 0] = False
            mask = torch.zeros(batch, 1, n, extent).masked_fill(hidden, torch.finfo(torch.float32).min)
            seen = (keys[:, :, :extent], values[:, :, :extent], mask)
            name = f"size {size}, {batch} times {n}"
            yield f"rotated, {name}", q
            yield f"keys, {name}", keys
            yield f"attention, {name}", ops.attend(q.view(batch, n, heads, size), *seen, size**-0.5)


def tree(place: int, length: int, parents: Sequence[int], slots: Sequence[int], newest: int = 24) -> Tensor:
    """Lines of the nodes of a tree behind `length` tokens; a root's parent is -1, and parents come first."""
    paths: list[list[int]] = []
    for parent, slot in zip(parents, slots, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else range(length)), slot])
    lines = [
        [3 + 5 * node, len(path) - 1, len(path) - 1, 0, place, slots[node], *([-1] * newest + path)[-newest:]]
        for node, path in enumerate(paths)
    ]
    return torch.tensor(lines)


def passes() -> Results:
    """A prompt of 37 tokens, then three tokens at once, then trees of 9 nodes and of 1, by models of two layers."""
    for size, gate, kind in ((64, SILU, 0), (128, GELU, 3), (16, SILU, 9)):
        sizes = Sizes(
            hidden=96, heads=6, kv_heads=2, size=size, middle=80 + 16 * (gate == GELU), gate=gate, eps=1e-5,
            scale=size**-0.5,
        )  # fmt: skip
        made = [_layer(sizes, kind, window) for window in (0, 9)]
        model = PassModel(sizes, made, matrices(VOCAB, 96)[kind], None, floats(96))
        rotations = [(tensor(50, size // 2), tensor(50, size // 2))]
        tokens = torch.from_numpy(RNG.integers(0, VOCAB, (2, 40)))
        for dtype in (torch.float32, torch.float16, torch.int8):
            for bits in (0, 8, 16):
                wide = size + SCALE_BYTES * (dtype is torch.int8)
                cache = [tuple(torch.zeros(2, 2, 50, wide, dtype=dtype) for _ in range(2)) for _ in made]
                for first, last in ((0, 37), (37, 40)):
                    pieces = [Piece(row, first, own[first:last]) for row, own in enumerate(tokens)]
                    logits, states = model.run(
                        of_pieces(pieces, 39).lines, cache, rotations, wanted=(0, 1, 2), bits=bits
                    )
                    name = f"pass of {first} to {last}, {size}, {dtype}, {bits} bits"
                    yield f"logits, {name}", logits
                    yield f"states, {name}", states
                nodes = torch.cat([tree(0, 40, (-1, 0, 0, 1, 1, 2, 3, 5, 5), range(40, 49)), tree(1, 40, (-1,), (40,))])
                logits, states = model.run(nodes, cache, rotations, wanted=(0, 1, 2), bits=bits)
                yield f"logits, trees, {size}, {dtype}, {bits} bits", logits
                yield f"states, trees, {size}, {dtype}, {bits} bits", states
                for i, (keys, values) in enumerate(cache):
                    yield f"keys, layer {i}, {size}, {dtype}, {bits} bits", keys
                    yield f"values, layer {i}, {size}, {dtype}, {bits} bits", values


def _layer(sizes: Sizes, kind: int, window: int) -> LayerWeights:
    shapes = shapes_of(sizes)
    given = {name: Floats(floats(*shape) / 8) for name, shape in shapes.items() if len(shape) == 2}
    given |= {name: matrices(*shapes[name])[kind] for name in ("q", "v", "up")}
    return LayerWeights(given, {k: floats(*shape) for k, shape in shapes.items() if len(shape) == 1}, 0, window)


def drafts() -> Results:
    """What passes through the C library's logarithm may differ in the last bits: its name begins with "about"."""
    state, leave, context, width, heads, size, guesses = 64, 96, 64, 32, 2, 32, 48
    shapes = {
        "cell_u": (2 * state, state), "cell_w": (2 * state, width), "from_context": (state, context),
        "query": (heads * size, context), **dict.fromkeys(("key", "value"), (heads * size, context + width)),
        "input_state": (leave, state), "input_context": (leave, context), "input_memory": (leave, heads * size),
        "head": (width, leave), "vocabulary": (guesses, width), "embedding": (VOCAB, width),
    }  # fmt: skip
    made = {name: floats(*shape) / 2 for name, shape in shapes.items()}
    packed = {name: PackedMatrix(quantise(weights, 4)) for name, weights in made.items()}
    biases = {"cell_bias": tensor(2 * state), "context_bias": tensor(state), "input_bias": tensor(leave)}
    model = DraftModel(
        packed, [PackedMatrix(quantise(floats(leave, leave), 4))], biases, [tensor(leave)],
        torch.from_numpy(made["vocabulary"]), torch.arange(guesses), 1.0, torch.tensor([-0.5, -0.125]), 2,
    )  # fmt: skip
    contexts, memory = tensor(3, context), tensor(3, heads, size, size)
    last = torch.tensor([1, 2, 3])
    how = {"temperature": torch.zeros(3), "noise": None}
    for wide, length in ((1, 4), (4, 3)):
        tokens, parents, scores, _ = model.search(contexts, memory, last, width=wide, length=length, **how)
        yield f"tokens of {wide} paths", tokens
        yield f"parents of {wide} paths", parents
        yield f"about: scores of {wide} paths", scores
    model.take(tensor(3, 4, context), torch.tensor([[4, 5, 6, 7]] * 3), torch.tensor([4, 0, 2]), contexts, memory)
    yield "contexts", contexts
    yield "about: memory", memory


def results() -> dict[str, np.ndarray]:
    with torch.no_grad():
        found = [pair for part in (products, layers, attention, passes, drafts) for pair in part()]
    return {name: np.asarray(made).copy() for name, made in found}


if __name__ == "__main__":
    np.savez(sys.argv[1], **results())
