"""A small random Whisper and chords for it to hear."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from redrafter.interop import wav
from redrafter.targets.speech import SpeechTarget

VOCAB, START, SILENT, END = 64, 60, 61, 62


class Letters:
    """A tokenizer: token i is the i-th letter."""

    def get_vocab(self):
        return {chr(65 + i): i for i in range(VOCAB)}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(65 + i) for i in ids if i < START)


def make_model(layers=3, dtype=torch.float64, **config):
    torch.manual_seed(0)
    config = {"max_source_positions": 50, "max_target_positions": 64} | config
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=layers,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=80,
            decoder_start_token_id=START,
            eos_token_id=END,
            bos_token_id=END,
            pad_token_id=END,
            **config,
        )
    )
    for name, weights in model.named_parameters():  # far from uniform, so that positions and sounds matter
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.4 if "embed" in name else 0.25)
    model.generation_config.no_timestamps_token_id = SILENT
    model.generation_config.suppress_tokens = [3, 4, START, SILENT]
    model.generation_config.begin_suppress_tokens = [5, END]
    return model.to(dtype).eval()


def make_target(**config) -> SpeechTarget:
    return SpeechTarget(make_model(**config), Letters())


def sounds(*seconds: float) -> list[torch.Tensor]:
    """Chords, different in each recording."""
    made = []
    for i, length in enumerate(seconds):
        t = torch.arange(int(length * wav.RATE)) / wav.RATE
        made.append(sum(torch.sin(6.28 * f * (i + 1) * t) for f in (110, 440, 970)) / 3)
    return made
