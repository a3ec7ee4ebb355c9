"""WAV files as a Whisper wants them: one channel, 16 kHz, fp32 between -1 and 1."""

import wave
from pathlib import Path

import torch
from torch import Tensor

from redrafter.errors import CorruptCheckpoint, ModelNotFound

RATE = 16_000


def read(path: Path) -> Tensor:
    """(samples,) of a PCM file of any rate and number of channels."""
    if not path.is_file():
        raise ModelNotFound(f"no audio file {path}")
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise CorruptCheckpoint(
            f"{path} is no PCM WAV file ({error or 'it ends too early'}); convert it with: "
            f"ffmpeg -i {path.name} -ar {RATE} -ac 1 -c:a pcm_s16le {path.stem}-16k.wav"
        ) from error
    whole = len(data) // (channels * width) * channels * width  # a file cut off within a sample
    if not whole or not rate:
        raise CorruptCheckpoint(f"{path} holds no sound")
    return resample(_samples(data[:whole], width).view(-1, channels).mean(1), rate)


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
    spectrum = torch.fft.rfft(sound)
    kept = torch.zeros(count // 2 + 1, dtype=spectrum.dtype)
    both = min(len(kept), len(spectrum))
    kept[:both] = spectrum[:both]
    made: Tensor = torch.fft.irfft(kept, n=count)
    return made * (count / sound.shape[0])
