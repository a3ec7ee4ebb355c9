"""`model.generate(..., custom_generate=redrafter.custom_generate, drafter=...)`."""

from collections.abc import Callable, Sequence
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

IGNORED = {"attention_mask", "use_cache", "logits_to_keep", "past_key_values", "cache_position", "position_ids"}
"""What generate prepares for a forward pass of its own and we make ourselves."""
WARPERS = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
}
"""transformers' last processors, in its order, which is ours too."""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any = "auto",
    shape: Shape | None = None,
    rule: RuleConfig | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """A decoding method for transformers' own `generate`: greedy text is theirs, in fewer passes.

    Sampled text has their distribution and our seeds: drawn from torch's global generator unless
    `seed` is given, so that `torch.manual_seed` repeats a text; row i uses fold(seed, i). Beams,
    scores and other outputs than the ids are refused; a streamer is never handed to us.
    """
    _refuse(input_ids, generation_config, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask
    sampling, processors = translate(logits_processor, bool(generation_config.do_sample), padded=not bool(real.all()))
    budget, eos, halts = endings(stopping_criteria, input_ids.shape[1])
    if budget is None:
        raise ConfigError("give max_new_tokens (or max_length) to generate")
    if seed is None:
        seed = int(torch.randint(2**62, (1,)))
    requests = [
        Request(
            prompt=ids[keep.bool()].tolist(),
            pads=ids[~keep.bool()].tolist(),
            max_new_tokens=budget,
            seed=fold(seed, row),
            sampling=sampling,
            eos=eos,
            halts=halts,
        )
        for row, (ids, keep) in enumerate(zip(input_ids, real, strict=True))
    ]
    was_training = model.training
    try:
        target = load_target(model)
        engine = Engine(target, resolve_drafter(drafter, target), shape=shape, rule=rule)
        done = engine.complete(requests, processors)
    finally:
        model.train(was_training)
    pad = generation_config.pad_token_id
    fill = pad if pad is not None else (eos[0] if eos else 0)
    longest = max(len(c.tokens) for c in done)
    new = [c.tokens + [fill] * (longest - len(c.tokens)) for c in done]
    sequences = torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], dim=1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _refuse(input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """By name, what would otherwise be ignored in silence."""
    if config.num_beams != 1:
        raise ConfigError(f"num_beams={config.num_beams} cannot be used: redrafter samples or is greedy")
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


def translate(processors: Sequence[Any], do_sample: bool, padded: bool = False) -> tuple[SamplingParams, list[Any]]:
    """Their list as our sampling, and what must run as it is, before it.

    Ours: a repetition penalty at the front (theirs also counts pads, so only where there are none), and a
    run of temperature, top-k, top-p, min-p at the end. Whatever stands elsewhere keeps its place in the
    list, and if something follows the run, so does the run.
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
