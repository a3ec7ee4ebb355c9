"""Damaged WAV files: each is read or refused in one line, at once and in little memory."""

import random
import resource
import struct
import time
from collections import Counter

import pytest
import torch

from redrafter.errors import RedrafterError
from redrafter.interop import wav
from tests.interop.test_wav import wav_bytes

CASES = 4000
SECONDS, MEGABYTES = 1.0, 300
"""What one file may take, and by how much all of them may raise the memory."""
NUMBERS = (0, 1, 2, 3, 7, 8, 24, 32, 64, 255, 256, 4001, 65535, 767_999, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1)


def base_files(rng: random.Random) -> list[bytes]:
    """Short recordings of every sample width, with other chunks and without."""
    files = [
        wav_bytes(rng.randbytes(32_000)),
        wav_bytes(rng.randbytes(44_100 * 4), rate=44_100, channels=2),
        wav_bytes(rng.randbytes(8_009), rate=8_000, bits=8),
        wav_bytes(rng.randbytes(48_000 * 3), rate=48_000, bits=24),
        wav_bytes(rng.randbytes(96_000 * 4), rate=96_000, channels=6, bits=32),
    ]
    note = b"LIST" + struct.pack("<I", 5) + b"hello\0"
    return [*files, files[0][:12] + note + files[0][12:36] + note + files[0][36:]]


def mutated(file: bytes, rng: random.Random) -> bytes:
    """The file with a few changes, most of them in its header."""
    data = bytearray(file)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(data), 64 if rng.random() < 0.9 else len(data)))
        match rng.randrange(7):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS))
            case 3:
                data[at : at + 2] = struct.pack("<H", rng.choice(NUMBERS) % 2**16)
            case 4:
                del data[rng.randrange(len(data)) :]
            case 5:
                del data[at : at + rng.randint(1, 8)]
            case 6:
                chunk = rng.choice((b"fmt ", b"data", b"RIFF", b"JUNK")) + struct.pack("<I", rng.choice(NUMBERS))
                data[at:at] = chunk + rng.randbytes(rng.randrange(20))
        if not data:
            return b""
    return bytes(data)


def memory() -> float:
    """The most memory that the process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.fuzz
def test_wav_files(tmp_path):
    rng = random.Random(16)
    files, path, ends = base_files(rng), tmp_path / "a.wav", Counter[str]()
    for file in files:
        path.write_bytes(file)
        assert len(wav.read(path))
    failed, slowest, before = [], 0.0, memory()
    for case in range(CASES):
        path.write_bytes(data := mutated(rng.choice(files), rng))
        began = time.perf_counter()
        try:
            sound = wav.read(path)
            end = "used" if sound.dtype == torch.float32 and len(sound) and bool(sound.isfinite().all()) else "failed"
        except RedrafterError as error:
            end = "refused" if "\n" not in str(error) else "failed"
        except Exception as error:
            end = "failed"
            failed.append(f"case {case}: {error!r}, header {data[:64].hex()}")
        ends[end] += 1
        seconds = time.perf_counter() - began
        slowest = max(slowest, seconds)
        if seconds > SECONDS:
            failed.append(f"case {case}: {seconds:.1f} s, header {data[:64].hex()}")
    grown = memory() - before
    print(f"\n{CASES} WAV files: {dict(ends)}; slowest {slowest * 1000:.0f} ms; memory grew by {grown:.0f} MB")
    assert not failed, "\n".join(failed)
    assert not ends["failed"]
    assert ends["used"] > CASES / 10
    assert ends["refused"] > CASES / 10
    assert grown < MEGABYTES
