"""WAV files as a Whisper wants them: one channel, 16 kHz, fp32 between -1 and 1."""

import math
import wave
from pathlib import Path

import torch
from torch import Tensor

from redrafter.errors import CorruptCheckpoint, ModelNotFound

RATE = 16_000
RATES = (4_000, 768_000)
"""Samples per second of a file. Fewer are no speech, and a few kilobytes could claim to be hours."""
WIDTHS = (1, 2, 3, 4)
"""Bytes of a sample."""
BLOCK = 2**22
"""Bytes read at once: a header may claim more than the file has."""


def read(path: str | Path) -> Tensor:
    """(samples,) of a PCM file with any number of channels."""
    path = Path(path)
    if not path.is_file():
        raise ModelNotFound(f"no audio file {path}")
    try:
        with path.open("rb") as stream, wave.open(stream) as file:
            sound, rate = _one_channel(file), file.getframerate()
    except OSError as error:
        raise CorruptCheckpoint(f"cannot read {path}: {error.strerror}") from error
    except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: a chunk that claims more than the file has
        raise CorruptCheckpoint(
            f"{path} is no PCM WAV file ({str(error) or 'it ends too early'}); convert it with: "
            f"ffmpeg -i {path.name} -ar {RATE} -ac 1 -c:a pcm_s16le {path.stem}-16k.wav"
        ) from error
    if not len(sound):
        raise CorruptCheckpoint(f"{path} holds no sound")
    return resample(sound, rate)


def _one_channel(file: wave.Wave_read) -> Tensor:
    """(samples,) at the file's rate: the mean of its channels."""
    channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
    if width not in WIDTHS:
        raise wave.Error(f"a sample has {width} bytes, not {WIDTHS[0]} to {WIDTHS[-1]}")
    if not RATES[0] <= rate <= RATES[1]:
        raise wave.Error(f"{rate} samples per second, not {RATES[0]} to {RATES[1]}")
    frame = channels * width
    blocks = [torch.empty(0)]
    while whole := len(data := file.readframes(max(1, BLOCK // frame))) // frame * frame:  # it may end within a sample
        blocks.append(_samples(data[:whole], width).view(-1, channels).mean(1))
    return torch.cat(blocks)


def _samples(data: bytes, width: int) -> Tensor:
    """Little-endian integers of 1 to 4 bytes; those of one byte are unsigned."""
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, width)
    if width == 1:
        return (raw[:, 0].float() - 128) / 128
    wide = torch.zeros(raw.shape[0], 4, dtype=torch.uint8)
    wide[:, 4 - width :] = raw  # the missing bytes are the lowest
    return wide.view(torch.int32)[:, 0].float() / 2**31


def resample(sound: Tensor, rate: int) -> Tensor:
    """(samples,) at `rate` -> at 16 kHz, by cutting or padding the spectrum.

    >>> resample(torch.ones(8000), 8000).shape
    torch.Size([16000])
    """
    if rate == RATE:
        return sound
    count = max(1, round(sound.shape[0] * RATE / rate))
    period = rate // math.gcd(rate, RATE)
    periods = few_factors(-(-sound.shape[0] // period))
    before, after = periods * period, periods * period * RATE // rate
    spectrum = torch.fft.rfft(sound, n=before)
    kept = torch.zeros(after // 2 + 1, dtype=spectrum.dtype)
    both = min(len(kept), len(spectrum))
    kept[:both] = spectrum[:both]
    resampled: Tensor = torch.fft.irfft(kept, n=after)[:count]
    return resampled * (after / before)


def few_factors(size: int) -> int:
    """A number little above, of a small factor and a power of two: a Fourier transform of a prime is slow.

    >>> few_factors(60), few_factors(1009)
    (60, 1024)
    """
    shift = max(0, size.bit_length() - 6)
    return -(-size >> shift) << shift
