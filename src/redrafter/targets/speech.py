"""Whisper's decoder as a target. Each row of the KV cache also has the encoder's states of its audio."""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from redrafter.core.cache import KVCache
from redrafter.core.recurrence import TextPass, TreePass
from redrafter.errors import ConfigError, UnsupportedTarget
from redrafter.kernels import runs_cpp
from redrafter.targets.cpu.modules import linear
from redrafter.targets.hf_cache import HFCache
from redrafter.targets.target import Target


class SpeechCache(KVCache):
    """A KV cache with the encoder's states (B, F, C) of each row, for cross-attention.

    The first pass computes the keys and values of the encoder's states. They never change; a commit leaves them alone.
    """

    def __init__(self, slots: int, encoder_states: Tensor) -> None:
        super().__init__(slots)
        self.encoder_states = encoder_states
        self.cross = DynamicCache()

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.encoder_states = self.encoder_states[rows]
        self.cross.batch_select_indices(rows)


class SpeechTarget(Target):
    """A WhisperForConditionalGeneration. Tokens that its generation config suppresses have logits of -inf."""

    def __init__(self, model: Any, tokenizer: Any = None, name: str | None = None, language: str = "en") -> None:
        if not hasattr(model.config, "max_target_positions") or not hasattr(model, "proj_out"):
            raise UnsupportedTarget(f"{type(model).__name__} is not a Whisper model with a decoder")
        super().__init__(model, tokenizer, name)
        self.layer_count = self.config.decoder_layers
        self.max_positions = self.config.max_target_positions
        self.opening = _opening(model, self.name, language)
        self._never = self._ids("suppress_tokens")
        self._never_first = self._ids("begin_suppress_tokens")

    def _ids(self, name: str) -> Tensor:
        """Token ids in a field of the generation config, without those outside a draft model's smaller vocabulary."""
        ids = getattr(self.model.generation_config, name, None) or []
        return torch.tensor([i for i in ids if i < self.vocab_size], dtype=torch.long, device=self.device)

    @torch.no_grad()
    def encode_audio(self, features: Tensor) -> Tensor:
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
        order: TreePass | TextPass | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(cache, SpeechCache)
        out = self.model.model.decoder(
            input_ids=tokens,
            position_ids=self.clamp_positions(positions),
            attention_mask=self.attention.masks(visible, positions, key_positions, self.dtype),
            encoder_hidden_states=cache.encoder_states,
            past_key_values=EncoderDecoderCache(HFCache(cache, self.layer_count, slots, visible.shape[2]), cache.cross),
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
        """Suppress tokens, in place: a copy of the logits would take longer than the suppression."""
        logits.index_fill_(-1, self._never, -torch.inf)
        opens = (positions == len(self.opening) - 1)[..., None]
        logits[..., self._never_first] = logits[..., self._never_first].masked_fill(opens, -torch.inf)
        return logits


@torch.no_grad()
def install_cpu_linears(target: SpeechTarget) -> None:
    """Use the CPU kernel for the linear layers of a decoder that redrafter loaded or built.

    torch's product of more than three tokens takes twice as long as of one, which would cancel a step's gain.
    """
    if target.dtype != torch.float32 or not runs_cpp(target.device):
        return
    for module in (*target.model.model.decoder.modules(), target.output_embedding):
        if type(module) is nn.Linear and "forward" not in vars(module):
            sample = torch.linspace(-1, 1, 3 * module.in_features).view(1, 3, -1)
            if torch.allclose(linear(module, sample), module(sample), rtol=1e-4, atol=1e-4):
                module.forward = MethodType(linear, module)  # type: ignore[method-assign]
                target.on_release(partial(vars(module).pop, "forward", None))


def _opening(model: Any, name: str, language: str) -> list[int]:
    """The prompt tokens that ask for a transcript without time stamps."""
    generation = model.generation_config
    opening = [model.config.decoder_start_token_id]
    if getattr(generation, "is_multilingual", False):
        languages = generation.lang_to_id
        if f"<|{language}|>" not in languages:
            known = ", ".join(key.strip("<|>") for key in languages)
            raise ConfigError(f"{name} does not know the language {language!r}; use one of {known}")
        opening += [languages[f"<|{language}|>"], generation.task_to_id["transcribe"]]
    elif language != "en":
        raise ConfigError(f"{name} knows English only, not {language!r}")
    silent = getattr(generation, "no_timestamps_token_id", None)
    return opening if silent is None else [*opening, silent]
