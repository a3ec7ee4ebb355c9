"""`model.generate(..., custom_generate=redrafter.custom_generate, drafter=...)`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation import stopping_criteria as criteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from redrafter.config import RuleConfig, SamplingParams, Shape
from redrafter.core.noise import fold
from redrafter.engine.engine import Engine
from redrafter.engine.request import Request
from redrafter.engine.resolve import resolve_drafter
from redrafter.errors import ConfigError
from redrafter.targets import load_target


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any = "ngram",
    shape: Shape | None = None,
    rule: RuleConfig | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding method for transformers' own `generate`: same arguments, same result, fewer passes.

    Sampling draws its seed from torch's global generator unless `seed` is given, so that
    `torch.manual_seed` repeats a text; row i uses fold(seed, i).
    """
    if generation_config.num_beams != 1:
        raise ConfigError(f"num_beams={generation_config.num_beams} cannot be used: redrafter samples or is greedy")
    sampling, processors = translate(logits_processor, do_sample=bool(generation_config.do_sample))
    engine = Engine((target := load_target(model)), resolve_drafter(drafter, target), shape=shape, rule=rule)
    if seed is None:
        seed = int(torch.randint(2**62, (1,)))
    budget, eos, halts = endings(stopping_criteria, input_ids.shape[1])
    if budget is None:
        raise ConfigError("give max_new_tokens (or max_length) to generate")
    # Not a parameter by name: transformers would then hand it over twice.
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask
    requests = [
        Request(
            prompt=ids[keep.bool()].tolist(),
            max_new_tokens=budget,
            seed=fold(seed, row),
            sampling=sampling,
            eos=eos,
            halts=halts,
        )
        for row, (ids, keep) in enumerate(zip(input_ids, real, strict=True))
    ]
    done = engine.complete(requests, processors)
    pad = generation_config.pad_token_id
    fill = pad if pad is not None else (eos[0] if eos else 0)
    longest = max(len(c.tokens) for c in done)
    new = [c.tokens + [fill] * (longest - len(c.tokens)) for c in done]
    sequences = torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], dim=1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def translate(processors: LogitsProcessorList, do_sample: bool) -> tuple[SamplingParams, list[Any]]:
    """transformers' own temperature, filters and penalties as ours; all others as they are."""
    values: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    rest = []
    for p in processors:
        match p:
            case logits_process.TemperatureLogitsWarper():
                values["temperature"] = float(p.temperature)
            case logits_process.TopKLogitsWarper():
                values["top_k"] = int(p.top_k)
            case logits_process.TopPLogitsWarper():
                values["top_p"] = float(p.top_p)
            case logits_process.MinPLogitsWarper():
                values["min_p"] = float(p.min_p)
            case logits_process.RepetitionPenaltyLogitsProcessor() if not p.prompt_ignore_length:
                values["repetition_penalty"] = float(p.penalty)
            case _:
                rest.append(p)
    return SamplingParams(**values), rest


def endings(
    conditions: StoppingCriteriaList, prompt_width: int
) -> tuple[int | None, tuple[int, ...], Callable[[list[int]], bool] | None]:
    """New tokens allowed, ending tokens, and all other criteria as one question about the ids so far."""
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

    def halts(ids: list[int]) -> bool:
        whole = torch.tensor([ids])
        return any(bool(torch.as_tensor(c(whole, None)).all()) for c in others)

    return budget, eos, halts if others else None
