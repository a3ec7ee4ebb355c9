"""Whisper's decoder as a target: the same step, with what was heard beside each row's cache."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from redrafter.core.cache import KVCache
from redrafter.errors import ConfigError, UnsupportedTarget
from redrafter.kernels import runs_cpp
from redrafter.targets.cpu.modules import linear
from redrafter.targets.hf_cache import WornCache
from redrafter.targets.target import Target


class Heard(KVCache):
    """A KV cache whose rows also have the encoder's states (B, F, C) to look at.

    Their keys and values are made by the first pass and never change; a commit does not touch them.
    """

    def __init__(self, slots: int, sound: Tensor) -> None:
        super().__init__(slots)
        self.sound = sound
        self.cross = DynamicCache()

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.sound = self.sound[rows]
        self.cross.batch_select_indices(rows)


class SpeechTarget(Target):
    """A WhisperForConditionalGeneration. What its generation config forbids is part of its logits."""

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None, language: str = "en") -> None:
        if not hasattr(model.config, "max_target_positions") or not hasattr(model, "proj_out"):
            raise UnsupportedTarget(f"{type(model).__name__} is no Whisper with a decoder that writes text")
        super().__init__(model, tokenizer, name)
        self.layer_count = self.config.decoder_layers
        self.max_positions = self.config.max_target_positions
        self.opening = _opening(model, self.name, language)
        self._never = self._ids("suppress_tokens")
        self._never_first = self._ids("begin_suppress_tokens")

    def _ids(self, name: str) -> Tensor:
        """Tokens among those this model can write (a draft model may know fewer)."""
        ids = getattr(self.model.generation_config, name, None) or []
        return torch.tensor([i for i in ids if i < self.vocab_size], dtype=torch.long, device=self.device)

    @torch.no_grad()
    def hear(self, features: Tensor) -> Tensor:
        """Log-mel features (B, mels, 2F) -> encoder states (B, F, C)."""
        states: Tensor = self.model.model.encoder(features.to(self.device, self.dtype)).last_hidden_state
        return states

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        cache: KVCache,
        layers: tuple[int, ...],
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(cache, Heard)
        out = self.model.model.decoder(
            input_ids=tokens,
            position_ids=self.existing(positions),
            attention_mask=self.attention.masks(visible, positions, key_positions, self.dtype),
            encoder_hidden_states=cache.sound,
            past_key_values=EncoderDecoderCache(
                WornCache(cache, self.layer_count, slots, visible.shape[2]), cache.cross
            ),
            use_cache=True,
            output_hidden_states=len(layers) > 0,
        )
        states = out.last_hidden_state
        if keep is not None:
            states, positions = states[:, keep], positions[:, keep]
        logits = self._allowed(self.output_embedding(states), positions)
        if not layers:
            return logits, logits.new_zeros(*tokens.shape, 0)
        return logits, torch.cat([out.hidden_states[i] for i in layers], dim=-1)

    def _allowed(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Written into the logits themselves: a copy of them costs more than this."""
        logits.index_fill_(-1, self._never, -torch.inf)
        opens = (positions == len(self.opening) - 1)[..., None]
        logits[..., self._never_first] = logits[..., self._never_first].masked_fill(opens, -torch.inf)
        return logits


@torch.no_grad()
def quicken(target: SpeechTarget) -> None:
    """Products of few tokens by the CPU's own kernel, in a model that we loaded or made ourselves.

    Above three tokens torch's take twice as long as for one, which is what a step would have gained.
    """
    if target.dtype != torch.float32 or not runs_cpp(target.device):
        return
    for module in (*target.model.model.decoder.modules(), target.output_embedding):
        if type(module) is nn.Linear and "forward" not in vars(module):
            sample = torch.linspace(-1, 1, 3 * module.in_features).view(1, 3, -1)
            if torch.allclose(linear(module, sample), module(sample), rtol=1e-4, atol=1e-4):
                module.forward = MethodType(linear, module)  # type: ignore[method-assign]


def _opening(model: Any, name: str, language: str) -> list[int]:
    """The tokens that ask for a transcript without time stamps."""
    generation = model.generation_config
    opening = [model.config.decoder_start_token_id]
    if getattr(generation, "is_multilingual", False):
        languages = generation.lang_to_id
        if f"<|{language}|>" not in languages:
            known = ", ".join(key.strip("<|>") for key in languages)
            raise ConfigError(f"{name} knows no language {language!r}; use one of {known}")
        opening += [languages[f"<|{language}|>"], generation.task_to_id["transcribe"]]
    elif language != "en":
        raise ConfigError(f"{name} knows English only, not {language!r}")
    silent = getattr(generation, "no_timestamps_token_id", None)
    return opening if silent is None else [*opening, silent]
