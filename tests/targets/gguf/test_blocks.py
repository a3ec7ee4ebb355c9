"""Every GGUF type against the `gguf` package: the same fp32 weights, bit for bit."""

import struct

import gguf
import numpy as np
import pytest

from redrafter.errors import CorruptCheckpoint, ModelNotFound, UnsupportedTarget
from redrafter.kernels.cpu.matrices import Floats, Quantised
from redrafter.targets.gguf.blocks import read
from redrafter.targets.gguf.file import LAYOUTS, GGUFFile

KINDS = [gguf.GGMLQuantizationType(number) for number in LAYOUTS]
ROWS, COLUMNS = 5, 512


def random_bytes(kind, rows=ROWS, columns=COLUMNS, seed=0):
    """Random blocks of a type. Scales are finite: NaN has many bit patterns, and no model has one."""
    rng, layout = np.random.default_rng(seed), LAYOUTS[kind]
    data = rng.integers(0, 256, (rows * columns // layout.values, layout.size), dtype=np.uint8)
    halves = {"F16": [0], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    if layout.name in ("F32", "BF16"):
        return data.view(np.uint8).reshape(rows, -1) & np.uint8(0xBF)
    if layout.name == "MXFP4":
        data[:, 0] = np.minimum(data[:, 0], 250)  # no weight overflows
    for at in halves.get(layout.name, [0]):
        data[:, at + 1] &= 0xBF  # an exponent below the largest
    return data.reshape(rows, -1)


def write(path, tensors, metadata=None, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (metadata or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def every_type(tmp_path_factory):
    tensors = {kind.name: (random_bytes(kind), kind) for kind in KINDS}
    metadata = {
        "some.number": 7,
        "some.text": "é",
        "some.list": ["a", "bc"],
        "some.floats": [0.5, 2.0],
        "some.flag": True,
    }
    return write(tmp_path_factory.mktemp("gguf") / "types.gguf", tensors, metadata)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_are_those_of_the_gguf_package(every_type, kind):
    tensor = GGUFFile(every_type).tensors[kind.name]
    matrix = read(tensor)
    wanted = gguf.quants.dequantize(random_bytes(kind), kind)
    assert tensor.shape == matrix.shape == (ROWS, COLUMNS)
    made = matrix.dequantise()
    assert made.dtype == np.float32
    assert np.array_equal(made.view(np.uint32), wanted.astype(np.float32).view(np.uint32))
    order = np.array([3, 0, 4])
    assert np.array_equal(matrix.select(order).dequantise(), made[order])
    if isinstance(matrix, Quantised):
        assert matrix.group == (16 if kind.name in ("Q6_K", "MXFP4") else 32)  # random exponents of MXFP4 need fp32
        assert matrix.bits == (4 if kind.name.startswith("Q4") else 8)
        assert matrix.values.dtype == (np.uint8 if matrix.bits == 4 else np.int8)
        assert matrix.bits == 8 or matrix.values.max() == 15
    else:
        assert isinstance(matrix, Floats)


def test_twin_another_minimum_is_seen(every_type):
    matrix = read(GGUFFile(every_type).tensors["Q4_1"])
    wanted = gguf.quants.dequantize(random_bytes(KINDS[3]), KINDS[3])
    matrix.minimums[0, 0] = np.nextafter(matrix.minimums[0, 0], np.float16(0))
    assert not np.array_equal(matrix.dequantise().view(np.uint32), wanted.view(np.uint32))


def test_metadata(every_type):
    found = GGUFFile(every_type).metadata
    assert found["general.architecture"] == "llama"
    assert (found["some.number"], found["some.text"], found["some.list"]) == (7, "é", ["a", "bc"])
    assert (found["some.floats"], found["some.flag"]) == ([0.5, 2.0], True)


def test_damaged_files(every_type, tmp_path):
    whole = every_type.read_bytes()

    def opened(content):
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        return GGUFFile(path)

    with pytest.raises(ModelNotFound, match="no file"):
        GGUFFile(tmp_path / "nothing.gguf")
    with pytest.raises(CorruptCheckpoint, match="cannot read"):
        opened(b"")
    with pytest.raises(CorruptCheckpoint, match="no GGUF file"):
        opened(b"GGML" + whole[4:])
    with pytest.raises(UnsupportedTarget, match="big-endian"):
        opened(whole[:4] + whole[4:8][::-1] + whole[8:])
    with pytest.raises(UnsupportedTarget, match="version 9"):
        opened(whole[:4] + b"\x09\0\0\0" + whole[8:])
    with pytest.raises(CorruptCheckpoint, match="ends within its header"):
        opened(whole[:150])
    with pytest.raises(CorruptCheckpoint, match="ends within the tensor"):
        opened(whole[:-1000])
    with pytest.raises(CorruptCheckpoint, match="claims"):
        opened(whole[:8] + b"\xff" * 8 + whole[16:])
    kind = whole.index(b"Q4_1") + 4 + 4 + 16
    with pytest.raises(UnsupportedTarget, match="type 40"):
        opened(whole[:kind] + b"\x28" + whole[kind + 1 :])


def test_tensors_off_the_alignment_and_twice(tmp_path):
    def opened(offset=0, alignment=32, names=("a", "b")):
        """A file of two vectors of eight numbers."""
        text = [struct.pack("<Q", len(t)) + t.encode() for t in ("general.alignment", *names)]
        entries = b"".join(
            t + struct.pack("<IQIQ", 1, 8, 0, at) for t, at in zip(text[1:], (0, offset or 32), strict=True)
        )
        header = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + text[0] + struct.pack("<II", 4, alignment) + entries
        (tmp_path / "x.gguf").write_bytes(header + bytes(-len(header) % alignment) + bytes(range(96)))
        return GGUFFile(tmp_path / "x.gguf")

    assert list(opened().tensors) == ["a", "b"]
    for words, options in (
        ("tensor 'b' begins at 33, no multiple of the alignment 32", {"offset": 33}),
        ("tensor 'b' begins at 40", {"offset": 40}),
        ("alignment is 4, no multiple of 8", {"alignment": 4}),
        ("two tensors 'a'", {"names": ("a", "a")}),
    ):
        with pytest.raises(CorruptCheckpoint, match=words):
            opened(**options)
    assert opened(8 * 5, alignment=8).tensors["b"].data[0, 0] == 40


def test_mutated_headers_give_one_line_or_a_model(every_type, tmp_path):
    """1,000 files with a few bytes changed: each opens, or raises an error for users."""
    rng, whole, path = np.random.default_rng(0), every_type.read_bytes(), tmp_path / "x.gguf"
    header = whole.index(b"Q6_K") + 40
    said = []
    for turn in range(1000):
        content = bytearray(whole if turn % 4 else whole[: rng.integers(8, len(whole))])
        for at in rng.integers(4, min(header, len(content)), rng.integers(1, 6)):
            content[at] = rng.choice([0, 1, 127, 255, int(rng.integers(0, 256))])
        path.write_bytes(content)
        try:
            for tensor in GGUFFile(path).tensors.values():
                tensor.data.sum()
        except (CorruptCheckpoint, UnsupportedTarget) as error:
            said.append(str(error))
    refused = len(said)
    assert not any("\n" in text for text in said)
    assert 300 < refused < 1000


def test_scales_of_mxfp4_take_two_bytes_where_fp16_holds_them(tmp_path):
    kind = gguf.GGMLQuantizationType.MXFP4
    for exponents, wanted in (((104, 142), np.float16), ((0, 250), np.float32)):
        data = random_bytes(kind).reshape(-1, 17)
        data[:, 0] = np.linspace(*exponents, len(data)).astype(np.uint8)
        data = data.reshape(ROWS, -1)
        matrix = read(GGUFFile(write(tmp_path / "x.gguf", {"x": (data, kind)})).tensors["x"])
        assert matrix.scales.dtype == wanted
        assert np.array_equal(matrix.dequantise(), gguf.quants.dequantize(data, kind))
