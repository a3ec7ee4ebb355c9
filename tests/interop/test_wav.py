"""WAV files that are damaged, odd or long: one line, and no more time and memory than the file's size asks for."""

import struct

import pytest
import torch

from redrafter.errors import CorruptCheckpoint, RedrafterError
from redrafter.interop import wav


def wav_bytes(data: bytes = b"\0\1" * 1600, *, rate=16000, channels=1, bits=16, kind=1, claims=None) -> bytes:
    """A WAV file; `claims`: the size of the data that its header claims."""
    frame = channels * bits // 8 % 2**16
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * frame % 2**32, frame, bits)
    size = len(data) if claims is None else claims
    chunks = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", min(2**32 - 1, len(chunks) - len(data) + size)) + chunks


def read(tmp_path, data: bytes) -> torch.Tensor:
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    return wav.read(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wav_bytes(bits=40), "a sample has 5 bytes"),
        (wav_bytes(bits=64), "a sample has 8 bytes"),
        (wav_bytes(bits=0), "bad sample width"),
        (wav_bytes(channels=0), "bad # of channels"),
        (wav_bytes(rate=0), "0 samples per second"),
        (wav_bytes(rate=1), "1 samples per second"),
        (wav_bytes(rate=2**32 - 1), "4294967295 samples per second"),
        (wav_bytes(kind=3, bits=32), "unknown format: 3"),
        (wav_bytes()[:30], "it ends too early"),
        (wav_bytes().replace(b"fmt ", struct.pack("<4sI", b"LIST", 2**32 - 1)), "ffmpeg"),
        (b"RIFF", "it ends too early"),
        (wav_bytes(b""), "no sound"),
        (wav_bytes(b"\0"), "no sound"),
        (wav_bytes(channels=65535), "no sound"),
    ],
    ids=range(14),
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path, data, reason):
    with pytest.raises(CorruptCheckpoint) as error:
        read(tmp_path, data)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_a_header_that_claims_more_than_the_file_has(tmp_path):
    whole = read(tmp_path, wav_bytes())
    assert torch.equal(read(tmp_path, wav_bytes(claims=2**32 - 40)), whole)
    assert torch.equal(read(tmp_path, wav_bytes()[:-1]), whole[:-1])


def test_blocks_change_nothing(tmp_path, monkeypatch):
    data = torch.randint(0, 256, (9000,), dtype=torch.uint8).numpy().tobytes()
    for channels, bits in ((1, 8), (2, 16), (3, 24)):
        file = wav_bytes(data, channels=channels, bits=bits)
        monkeypatch.setattr(wav, "BLOCK", 2**22)
        whole = read(tmp_path, file)
        monkeypatch.setattr(wav, "BLOCK", 1000)
        assert torch.equal(read(tmp_path, file), whole)


@pytest.mark.parametrize("length", [8000, 8009, 30011])
@pytest.mark.parametrize("rate", [4001, 8000, 44100, 768000])
def test_a_tone_stays_a_tone_at_every_rate_and_length(rate, length):
    tone = torch.sin(6.2831853 * 200 * torch.arange(length) / rate)
    found = wav.resample(tone, rate)
    assert len(found) == round(length * wav.RATE / rate)
    expected = torch.sin(6.2831853 * 200 * torch.arange(len(found)) / wav.RATE)
    middle = slice(len(found) // 4, 3 * len(found) // 4)  # a tone that is cut off rings at its ends
    assert (found - expected)[middle].abs().max() < 0.03


def test_a_path_may_be_text(tmp_path):
    whole = read(tmp_path, wav_bytes())
    assert torch.equal(wav.read(str(tmp_path / "a.wav")), whole)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path, str(tmp_path / "none.wav")):
        with pytest.raises(RedrafterError, match="no audio file"):
            wav.read(path)
