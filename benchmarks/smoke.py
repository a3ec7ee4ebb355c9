"""Tiny random models, drafters, texts and sounds for the smoke runs of the benchmark scripts."""

import json
import tempfile
import wave
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from redrafter.drafters import EagleConfig, MedusaConfig, RecurrentConfig, checkpoint
from redrafter.drafters.base import DrafterConfig
from redrafter.interop import wav
from redrafter.results import here
from redrafter.targets import Target, load_target
from redrafter.train.config import DistillConfig
from redrafter.train.distill import distill

END = "<|end|>"
VOCAB = 257  # the 256 bytes and END
HIDDEN = 32
POSITIONS = 1024
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
QUESTIONS = ("Why is the sky blue?", "Who wrote this?", "How far is it to the sea?", "What is a tree?")


class TinyFiles:
    """Files for smoke runs in a temporary folder; each is made on first use."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="redrafter-smoke-")
        self.folder = Path(self._scratch.name)

    @staticmethod
    @cache
    def shared() -> "TinyFiles":
        """Return the files of this process. The folder is deleted when the process ends."""
        return TinyFiles()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The facts of a results file about this process."""
        return here()

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    @cached_property
    def questions(self) -> Path:
        """A question file in the Spec-Bench format."""
        path = self.folder / "questions.jsonl"
        lines = [{"question_id": i, "category": "writing", "turns": [text]} for i, text in enumerate(QUESTIONS)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    @cached_property
    def model(self) -> Path:
        """A random Llama with a byte-level tokenizer and a chat template."""
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            bos_token_id=None,
            eos_token_id=VOCAB - 1,
            tie_word_embeddings=False,
        )
        path = self.folder / "model"
        randomised(LlamaForCausalLM(config), 0.3).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    @cached_property
    def target(self) -> Target:
        return load_target(self.model, dtype="fp32", device="cpu")

    @cached_property
    def drafters(self) -> Path:
        """A folder with random drafters for the model: recurrent, medusa and eagle."""
        sizes: dict[str, Any] = {"vocab_size": VOCAB, "embedding_size": HIDDEN, "context_size": HIDDEN, "exit_size": 24}
        configs: dict[str, DrafterConfig] = {
            "recurrent": RecurrentConfig(
                **sizes | {"context_size": 2 * HIDDEN}, state_size=HIDDEN, layers=(1, -1)
            ),  # more hidden states than the others read
            "medusa": MedusaConfig(**sizes, heads=5),
            "eagle": EagleConfig(**sizes, heads=4, head_size=8),
        }
        for name, config in configs.items():
            checkpoint.write(self.folder / "drafters" / name, randomised(checkpoint.make(config), 0.2), self.target)
        return self.folder / "drafters"

    @property
    def drafter(self) -> Path:
        """A random recurrent drafter for the model."""
        return self.drafters / "recurrent"

    @cached_property
    def texts(self) -> Path:
        """A folder of texts by the model, as `redrafter distill` makes it."""
        path = self.folder / "texts"
        prompts = [f"{question} {i}" for i in range(4) for question in QUESTIONS]
        distill(self.target, path, DistillConfig(texts=16, max_new_tokens=12, batch=8), prompts=prompts)
        return path

    @cached_property
    def whisper(self) -> Path:
        """A random Whisper with a byte-level tokenizer."""
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        tokenizer = byte_tokenizer("<|startoftranscript|>", "<|notimestamps|>")
        start, silent = (tokenizer.convert_tokens_to_ids(t) for t in ("<|startoftranscript|>", "<|notimestamps|>"))
        config = WhisperConfig(
            vocab_size=len(tokenizer),
            d_model=HIDDEN,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=100,
            max_target_positions=32,
            decoder_start_token_id=start,
            eos_token_id=VOCAB - 1,
            bos_token_id=VOCAB - 1,
            pad_token_id=VOCAB - 1,
        )
        model = randomised(WhisperForConditionalGeneration(config), 0.3)
        model.generation_config.no_timestamps_token_id = silent
        # Few tokens remain, so that texts end soon.
        model.generation_config.suppress_tokens = [*range(2, VOCAB - 1), start, silent]
        model.generation_config.begin_suppress_tokens = [VOCAB - 1]
        path = self.folder / "whisper"
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    @cached_property
    def clips(self) -> Path:
        """A folder with one WAV file of two tones and its transcript."""
        path = self.folder / "clips"
        path.mkdir()
        with wave.open(str(path / "tones.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(wav.RATE)
            file.writeframes((tones(1.5) * 2**15).to(torch.int16).numpy().tobytes())
        (path / "transcripts.tsv").write_text("tones.wav\tand so it goes\n")
        return path


def byte_tokenizer(*special: str) -> Any:
    """A tokenizer whose tokens are the 256 bytes, END and `special`."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.add_special_tokens([END, *special])
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END)
    made.chat_template = TEMPLATE
    return made


def randomised(model: Any, std: float) -> Any:
    """Fill all matrices with random numbers, large enough that the model's texts vary."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, std, generator=generator)
    return model.eval()


def tones(seconds: float) -> torch.Tensor:
    t = torch.arange(int(seconds * wav.RATE)) / wav.RATE
    return (torch.sin(6.28 * 220 * t) + torch.sin(6.28 * 970 * t)) / 3
