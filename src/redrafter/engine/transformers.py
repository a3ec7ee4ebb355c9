"""`model.generate(..., custom_generate=redrafter.custom_generate, drafter=...)`."""

import copy
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from redrafter.bounds import check_value, checked
from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.noise import fold
from redrafter.engine.engine import Engine
from redrafter.engine.lockstep import LockstepBatch, Streamer
from redrafter.engine.request import Request
from redrafter.engine.resolve import resolve_drafter
from redrafter.errors import ConfigError
from redrafter.targets import load_target

CUSTOM_GENERATE_FOLDER = str(Path(__file__).parent / "hf")
"""A folder for `generate(custom_generate=..., trust_remote_code=True, streamer=...)`.

transformers passes a `streamer` to a function that it loads from a folder, not to a callable.
"""
IGNORED = {"attention_mask", "use_cache", "logits_to_keep", "past_key_values", "cache_position", "position_ids"}
"""Forward arguments that `generate` prepares. redrafter checks and then derives them itself."""
WARPERS = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}
"""The warpers that redrafter computes itself, in the order in which transformers and redrafter apply them."""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any = "auto",
    shape: Shape | str | None = None,
    rule: RuleConfig | None = None,
    seed: int | None = None,
    stream_to: Streamer | None = None,
    streamer: Streamer | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding method for transformers' own `generate`. Greedy text is the same as without redrafter.

    Sampled text has the same distribution. Its seed is drawn from torch's global generator unless `seed`
    is given, so `torch.manual_seed` repeats a text; row i uses fold(seed, i). Beam search, scores and
    outputs other than the ids are refused. The model is handed back unchanged.

    `stream_to` takes any transformers streamer. Use `stream_to`, not `streamer`: `generate` does not pass
    `streamer` to a callable `custom_generate`, so a `streamer` would receive the prompt and then nothing.
    With `CUSTOM_GENERATE_FOLDER` in place of this function, `streamer` works.
    """
    check_value("stream_to", stream_to, Streamer | None)
    sink = stream_to if stream_to is not None else streamer
    try:
        if stream_to is not None:  # `generate` itself puts the prompt into a `streamer`
            stream_to.put(input_ids.cpu())
        sequences = _generate(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            drafter,
            shape,
            rule,
            seed,
            sink,
        )
    finally:
        if sink is not None:  # also after an error, or a thread that reads the streamer would wait forever
            sink.end()
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


@checked
def _generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    drafter: Any,
    shape: Shape | str | None,
    rule: RuleConfig | None,
    seed: int | None,
    streamer: Streamer | None,
) -> Tensor:
    """Prompt and new tokens (B, width + T), as `generate` returns them."""
    real = _refuse(input_ids, config, model_kwargs)
    width = input_ids.shape[1]
    sampling, processors = translate(
        [_for_one_row(p, width) for p in logits_processor], bool(config.do_sample), padded=not bool(real.all())
    )
    budget, eos, others = endings(stopping_criteria, width)
    if budget is None:
        raise ConfigError("give max_new_tokens (or max_length) to generate")
    if seed is None:
        seed = int(torch.randint(2**62, (1,)))
    pad = config.pad_token_id
    fill = pad if pad is not None else (eos[0] if eos else 0)
    batch = LockstepBatch(input_ids, others, fill, pads=bool(eos), streamer=streamer)
    requests = [
        Request(
            prompt=ids[keep].tolist(),
            pads=ids[~keep].tolist(),
            max_new_tokens=budget,
            seed=fold(seed, row),
            sampling=sampling,
            eos=eos,
            halts=batch.stop_check(row) if others else None,
        )
        for row, (ids, keep) in enumerate(zip(input_ids, real, strict=True))
    ]
    target = load_target(model)
    try:
        # The engine serves this call alone: on a GPU, recording a plain step takes longer than plain steps would save.
        adapts = shape is None and target.device.type == "cpu"
        engine = Engine(target, resolve_drafter(drafter, target), shape=shape, adapts=adapts, rule=rule, exact=None)
        steps: Any = engine.run(requests, processors)
        with closing(steps):  # before the model is released, also after an error
            for parts in steps:
                for part in parts:
                    batch.add(part.row, part.tokens, ended=part.finish_reason is not None)
                if batch.advance():
                    break
    finally:
        target.release()
    return batch.ids


def _refuse(input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Tensor:
    """Refuse by name what redrafter would otherwise ignore; return which ids (B, width) are no padding."""
    if (config.num_beams or 1) != 1:
        raise ConfigError(f"num_beams={config.num_beams} cannot be used: redrafter samples or is greedy")
    for name in ("dola_layers", "penalty_alpha", "constraints", "force_words_ids"):
        if getattr(config, name, None):
            raise ConfigError(f"{name} cannot be used: redrafter samples or is greedy")
    if config.cache_implementation == "quantized":
        raise ConfigError("cache_implementation='quantized' cannot be used: redrafter keeps a KV cache of its own")
    if input_ids.shape[1] == 0:
        raise ConfigError("input_ids are empty: redrafter continues ids, not inputs_embeds")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ConfigError(f"{name} cannot be used: redrafter returns ids only")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ConfigError("past_key_values with tokens in it cannot be used: redrafter reads the whole prompt itself")
    for name, value in model_kwargs.items():
        if name not in IGNORED and value is not None:
            raise ConfigError(f"{name} cannot be used: redrafter's targets take token ids only")
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if real.shape != input_ids.shape or not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ConfigError(
            "the attention_mask must be zeros and then ones in each row: redrafter takes prompts that are padded on "
            "the left (tokenizer.padding_side = 'left')"
        )
    positions = model_kwargs.get("position_ids")
    derived = real.long().cumsum(-1) - 1
    if positions is not None and not bool(((positions == derived) | ~real).all()):
        raise ConfigError("position_ids cannot be used: redrafter counts a prompt's tokens from 0; leave them out")
    return real


class _PromptProcessor:
    """One of transformers' `encoder_...` processors, for one row at a time.

    Theirs keeps the prompts of the whole batch; a row's own prompt is the first `width` of its ids.
    """

    def __init__(self, processor: Any, width: int) -> None:
        self.processor, self.width = processor, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        prompt = input_ids[:, : self.width]
        if isinstance(self.processor, logits_process.EncoderNoRepeatNGramLogitsProcessor):
            own: Any = logits_process.EncoderNoRepeatNGramLogitsProcessor(self.processor.ngram_size, prompt)
        else:
            own = copy.copy(self.processor)
            own.encoder_input_ids = prompt
        result: Tensor = own(input_ids, scores)
        return result


def _for_one_row(processor: Any, width: int) -> Any:
    kinds = logits_process.EncoderNoRepeatNGramLogitsProcessor, logits_process.EncoderRepetitionPenaltyLogitsProcessor
    return _PromptProcessor(processor, width) if isinstance(processor, kinds) else processor


def translate(processors: Sequence[Any], do_sample: bool, padded: bool = False) -> tuple[SamplingParams, list[Any]]:
    """transformers' processors as redrafter's sampling parameters, and the processors that must run as they are.

    Sampling parameters cover a repetition penalty at the front of the list (transformers' also counts
    padding, so only without padding) and a run of temperature, top-k, top-p, min-p at its end. Any other
    processor stays in the list, and so does the run if another processor follows it.
    """
    values: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    rest = list(processors)
    run: dict[str, Any] = {}
    allowed = list(WARPERS) if do_sample else []
    while rest and type(rest[-1]) in allowed:
        kind = type(rest[-1])
        run[WARPERS[kind]] = getattr(rest.pop(), WARPERS[kind])
        allowed = allowed[: allowed.index(kind)]  # each once, in their order
    if any(type(p) in WARPERS for p in rest):
        return SamplingParams(**values), list(processors)
    penalty = logits_process.RepetitionPenaltyLogitsProcessor
    if rest and type(rest[0]) is penalty and not padded and not rest[0].prompt_ignore_length:
        values["repetition_penalty"] = float(rest.pop(0).penalty)
    return SamplingParams(**(values | run)), rest


def endings(conditions: Sequence[Any], prompt_width: int) -> tuple[int | None, tuple[int, ...], list[Any]]:
    """New tokens allowed, end-of-text tokens, and all other stopping criteria."""
    budget: int | None = None
    eos: tuple[int, ...] = ()
    others = []
    for condition in conditions:
        match condition:
            case criteria.MaxLengthCriteria():
                budget = condition.max_length - prompt_width
            case criteria.EosTokenCriteria():
                eos = tuple(condition.eos_token_id.tolist())
            case _:
                others.append(condition)
    return budget, eos, others
