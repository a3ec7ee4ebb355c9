"""`load` and `Engine`: what most users need to know."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch

from redrafter.bounds import Bounds, Count, checked
from redrafter.config import Gamma, Grammar, RuleConfig, SamplingParams, Shape, check_text_options
from redrafter.core.noise import fold
from redrafter.core.rules import Rule, make_rule
from redrafter.core.step import Drafter
from redrafter.drafters import NoDrafter
from redrafter.drafters.traits import drafts
from redrafter.engine.decode import decode
from redrafter.engine.encode import Messages, encode, prompt_ids
from redrafter.engine.exactness import Exact, Exactness, Promise, make_promise
from redrafter.engine.grammar import Grammars
from redrafter.engine.processors import check_processor
from redrafter.engine.request import Completion, Part, Request, as_list, check_request, room, seeds_of
from redrafter.engine.resolve import check_drafter, resolve_drafter
from redrafter.errors import ConfigError, OutOfMemory
from redrafter.kernels.threads import use_threads
from redrafter.planning.copying import MOST_COPIED
from redrafter.planning.planner import Planner
from redrafter.planning.steps import AnyPlanner, FixedSteps, Steps, planner_for, steps_of
from redrafter.runtime.batch import Batch
from redrafter.targets import Target, load_target
from redrafter.targets.cpu.packed_target import Activations, KVDtype, refuse_rounding, use_rounding
from redrafter.targets.load import runs_packed
from redrafter.tuning.store import use_profile

Runtime = Literal["auto", "compiled", "graphs", "eager"]

ROWS = (1, 2, 4, 8, 10, 16, 20, 32, 40, 64, 80, 128, 256)
"""Recorded batches have one of these numbers of rows, so that few recordings serve all."""
TEXT_OPTIONS = ("max_new_tokens", "ignore_eos", "grammar")
MOST_CHOICES = 1024
"""Of one prompt, in a request."""
CONTEXT = 1024
"""Recorded batches have room for a multiple of so many tokens: room costs memory alone."""


@checked
def load(
    model: Any = None,
    drafter: Any = "auto",
    *,
    shape: Shape | str | None = None,
    rule: RuleConfig | None = None,
    gamma: Gamma | str | None = None,
    runtime: Runtime = "auto",
    exact: Exact = "auto",
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    threads: int | None = None,
    kv_dtype: KVDtype = "fp32",
    activations: Activations | None = None,
    **model_kwargs: Any,
) -> "Engine":
    """Load a target and what guesses for it.

    model: a Hugging Face id, a folder, a GGUF file, a loaded transformers model; the default model if left out.
    dtype: "fp32", "bf16", ... or a torch dtype. On a CPU, without a dtype, the default model and GGUF files run on
        their own quantised weights; "q8" and "q4" quantise any other model of a known family, and "stored" keeps the
        weights of a bf16 or fp16 checkpoint as they are and computes in fp32. On any device, "int4" and "fp8" round the
        weights as `redrafter quantize` does.
    drafter: "auto" ("recurrent+ngram" if a drafter comes with the package for this model, "mtp+ngram" if the model's
        checkpoint has a module that loads, else "ngram"); "recurrent" or "mtp" (those alone); "ngram"; a folder or Hub
        id of a drafter (ours or published) or of a smaller causal LM; a drafter object; None for plain decoding.
        "+ngram" after a name mixes the text's n-grams in.
    shape: beam width, length and node budget, as a `Shape` or as "8x4:15". A given shape is drafted in every step. By
        default each step is planned: what suits the drafter is the most that is drafted, and steps decode plainly where
        drafts cost more time than they save. Prices that `redrafter tune` measured are known from the first step on.
    rule: the acceptance rule; `seeded` (lossless, token for token) by default.
    gamma: how far a drafter that is a causal LM guesses within the shape's length: "constant", "heuristic",
        "confidence", or a `Gamma`.
    runtime: "compiled" (torch.compile and CUDA graphs: the fastest, after a minute or so at first use), "graphs"
        (CUDA graphs alone: ready in seconds) or "eager"; "auto" is compiled on a GPU and eager on a CPU.
    exact: "require" refuses an engine whose `exactness` is not "bitwise"; "auto" takes any.
    threads: on a CPU, for the whole process, torch's own operations included; by default one per physical core.
    kv_dtype: "fp16" keeps the KV cache in half the memory, "int8" in little more than a quarter, for models that run on
        packed weights on a CPU. The text may differ from that of "fp32"; it is still that of plain decoding with the
        same choice.
    activations: what such a model multiplies with its quantised weights. "int16" (the default) changes a text only at a
        near tie. "fp32" rounds nothing and is slower; "int8" rounds as llama.cpp does, and is a little faster. The text
        is that of plain decoding with the same choice.
    """
    shape = None if shape is None else Shape.of(shape)
    if threads is not None:
        use_threads(threads)
    if not runs_packed(model, dtype, device, model_kwargs):
        refuse_rounding(kv_dtype, activations)
    target = load_target(model, tokenizer=tokenizer, dtype=dtype, device=device, **model_kwargs)
    use_rounding(target, kv_dtype, activations)
    trusts = bool(model_kwargs.get("trust_remote_code"))
    guesses = resolve_drafter(drafter, target, gamma, trust_remote_code=trusts)
    adapts = shape is None and gamma is None
    return Engine(target, guesses, shape=shape, adapts=adapts, rule=rule, runtime=runtime, exact=exact)


class Engine:
    """A target with a drafter. All its texts are the target's own. Use an engine from one thread at a time."""

    @checked
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        shape: Shape | str | None = None,
        adapts: bool | None = None,
        rule: RuleConfig | None = None,
        runtime: Runtime = "auto",
        exact: Exact | None = "auto",
    ) -> None:
        """`exact`: see `load`; None for callers that read no statistics: nothing is tried, nothing promised.

        adapts: plan each step (`planning`): whether to draft, how far, which nodes to verify; by default where no shape
            is given. A given shape is drafted in every step.
        """
        check_drafter(drafter)
        self.target = target
        self.runtime = runtime
        self.drafter = drafter
        self.shape = drafter.default_shape if shape is None else Shape.of(shape)
        self.rule_config = rule or RuleConfig()
        config = self.rule_config
        self.adapts = (shape is None if adapts is None else adapts) and self.drafts
        self.planner: AnyPlanner | None = None
        self.guesses = drafter  # what drafts in steps
        if self.adapts and config.name == "seeded":
            self.planner, self.guesses = planner_for(drafter, self.shape, target.device)
            use_profile(self.planner.costs, target, drafter, runtime)

        def rules(shape: Shape) -> Rule:  # not a method: batches keep it, and a circle would hold their memory
            return make_rule(config, shape, target.vocab_size, target.dtype)

        self.make_rule: Callable[[Shape], Rule] = rules
        self.recorded = runtime != "eager" and target.device.type == "cuda" and not target.recurrent
        self.compiles_step = runtime in ("auto", "compiled")  # False: compile the target's forward pass alone
        if self.recorded and self.compiles_step:
            from redrafter.targets.cuda.layer_compile import start_workers

            start_workers()
        self._idle: list[Batch] = []  # recorded batches that no run uses at the moment
        self._closed = False
        self._plain: Engine | None = None
        self.grammars = Grammars(target, self.eos_tokens())
        self.exact = exact
        if exact == "require":
            self.promise().check()

    @property
    def drafts(self) -> bool:
        return drafts(self.drafter)

    @property
    def shapes(self) -> list[Shape]:
        """All that may be verified in a step."""
        return [self.shape, Shape(width=1, length=MOST_COPIED)] if isinstance(self.planner, Planner) else [self.shape]

    @property
    def exactness(self) -> Exactness | None:
        """ "bitwise" or "ties": how far texts equal those of plain decoding. None if the rule promises no tokens."""
        return self.promise().exactness

    def promise(self) -> Promise:
        """The exactness of the engine's texts, and its reason."""
        if self.exact is None:
            return Promise("ties", "nothing was tried")
        return make_promise(
            self.target,
            self.drafter,
            self.rule_config,
            recorded=self.recorded,
            compiles=self.compiles_step,
            required=self.exact == "require",
        )

    def plain(self) -> "Engine":
        """The same target under the same rule of choice, decoding token by token."""
        if self._plain is None:
            self._plain = Engine(self.target, NoDrafter(), runtime=self.runtime, exact=self.exact)
            self._plain.grammars = self.grammars
        return self._plain

    def encode(self, prompt: str | Messages, **template: Any) -> list[int]:
        """Text as it is, or chat messages through the model's chat template -> token ids.

        `template` goes to the chat template: `tools`, `continue_final_message`, `add_generation_prompt`.
        """
        return encode(self.target, prompt, **template)

    @checked
    def generate(
        self, prompts: Any, *, batch_size: Count = 8, logits_processor: Sequence[Any] | None = None, **options: Any
    ) -> Any:
        """Completions of one prompt or a list of them (text, token ids or chat messages).

        At most `batch_size` prompts are written at once; a finished one makes room for the next. Options are those of
        `stream`. Returns one Completion, or a list in the order of the prompts,
        each followed by its further choices where n > 1.
        """
        single, many = as_list(prompts)
        done = self.complete(self.requests(many, **options), logits_processor or (), rows=batch_size)
        return done[0] if single and len(done) == 1 else done

    @checked
    def stream(self, prompts: Any, *, logits_processor: Sequence[Any] | None = None, **options: Any) -> Iterator[Part]:
        """Parts as they are decided, row by row within each step.

        max_new_tokens: at most this many new tokens, exactly as many if nothing ends the text before.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
        logit_bias: see `SamplingParams`.
        seed: same seed, same text, alone or in any batch; a list gives one per prompt.
        grammar: what the text must look like, a `Grammar` or a JSON schema; needs `pip install llguidance`.
        n: choices per prompt. stop: strings that end the text. ignore_eos: write on past its end.
        logits_processor: transformers LogitsProcessors that look at (ids, scores) only.
        """
        _, many = as_list(prompts)
        for parts in self.run(self.requests(many, **options), logits_processor or ()):
            yield from parts

    @checked
    def requests(
        self,
        prompts: Sequence[Any],
        *,
        max_new_tokens: Count = 128,
        seed: Any = None,
        n: Annotated[int, Bounds(least=1, most=MOST_CHOICES)] = 1,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        halts: Callable[[list[int]], bool] | None = None,
        grammar: Any = None,
        shown: Sequence[int] = (),
        **sampling: Any,
    ) -> list[Request]:
        """Check and spell out what is asked for: n requests per prompt."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        check_text_options(max_new_tokens, stops)
        known = SamplingParams.__dataclass_fields__
        for name in sampling:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *TEXT_OPTIONS], n=1, cutoff=0.7)
                hint = f"; did you mean {near[0]}?" if near else "; temperature=0 is greedy, above 0 samples"
                raise ConfigError(f"there is no option {name!r}{hint}")
        params = SamplingParams(**sampling)
        seeds = seeds_of(seed, len(prompts))
        if stops and self.target.tokenizer is None:
            raise ConfigError(f"stop strings need a tokenizer, and {self.target.name} came without one")
        if grammar is not None and ignore_eos:
            raise ConfigError("a text with a grammar ends where the grammar ends: leave ignore_eos out")
        constraint = None if grammar is None else self.grammars.compiled(Grammar.of(grammar))
        eos = () if ignore_eos else self.eos_tokens()
        requests = [
            Request(
                prompt=prompt_ids(prompt, self.encode),
                max_new_tokens=max_new_tokens,
                seed=own,
                sampling=params,
                eos=eos,
                stop=stops,
                halts=halts,
                shown=shown,
                constraint=constraint,
            )
            for prompt, own in zip(prompts, seeds, strict=True)
        ]
        for request in requests:
            check_request(request, self.target)
        return [replace(request, seed=fold(request.seed, choice)) for request in requests for choice in range(n)]

    @checked
    def run(
        self, requests: Sequence[Request], processors: Sequence[Any] = (), rows: Count | None = None
    ) -> Iterator[list[Part]]:
        """One list of parts per step; at most `rows` requests are written at once, by default all."""
        for request in requests:  # before anything is written for the others
            check_request(request, self.target)
        for processor in processors:
            check_processor(processor, self.target.vocab_size, self.target.device)
        rows = min(int(rows or len(requests)), len(requests))
        return self._run(requests, processors, rows) if requests else iter(())

    def _run(self, requests: Sequence[Request], processors: Sequence[Any], rows: int) -> Iterator[list[Part]]:
        promise = self.promise()  # before anything is recorded
        keep, drafter = True, self.drafter
        policy: Steps = FixedSteps(self.shape if self.drafts else None)
        free = not processors and all(r.constraint is None for r in requests)
        if free and self.planner is not None:
            policy, drafter = steps_of(self.planner), self.guesses
        batch = self._batch(requests, rows, drafter)
        try:
            yield from decode(batch, requests, self.rule_config, processors, rows, promise, policy)
        except torch.OutOfMemoryError as error:
            keep = False  # room is needed
            self._idle.clear()
            raise no_room("a step's working memory") from error
        finally:
            batch.reset()
            if keep and batch.recorded and not self._closed:
                self._idle.append(batch)

    def _batch(self, requests: Sequence[Request], rows: int, drafter: Drafter) -> Batch:
        """A batch with room for these requests: an idle recorded one, or a new one."""
        context = max(len(r.prompt) + min(r.max_new_tokens, room(self.target, r.prompt)) for r in requests)
        endings = max(1, *(len(r.eos) for r in requests)) if requests else 1
        if self.recorded:
            rows = next((n for n in ROWS if n >= rows), rows)
            context = min(-(-context // CONTEXT) * CONTEXT, self.target.max_positions)
        for batch in self._idle:
            if (batch.rows, batch.context, batch.state.rows.eos.shape[1]) == (rows, context, endings):
                self._idle.remove(batch)
                return batch
        try:
            return self._new_batch(rows, context, endings, drafter)
        except (torch.OutOfMemoryError, OutOfMemory):
            self._idle.clear()
        torch.cuda.empty_cache()  # outside the handler: the failed attempt holds memory until then
        try:
            return self._new_batch(rows, context, endings, drafter)
        except torch.OutOfMemoryError as error:
            raise no_room(f"a KV cache for {rows} rows of {context} tokens") from error

    def _new_batch(self, rows: int, context: int, endings: int, drafter: Drafter) -> Batch:
        return Batch(
            self.target,
            drafter,
            rows=rows,
            context=context,
            shapes=self.shapes,
            rules=self.make_rule,
            endings=endings,
            runtime=self.runtime,
            compiles_step=self.recorded and self.compiles_step,
            recorded=self.recorded,
        )

    def close(self) -> None:
        """Free the recorded batches' memory and give the model back as it came."""
        self._closed = True
        self._idle.clear()
        if self._plain is not None:
            self._plain.close()
        self.target.release()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @checked
    def complete(
        self, requests: Sequence[Request], processors: Sequence[Any] = (), rows: Count | None = None
    ) -> list[Completion]:
        """All requests to their ends; at most `rows` of them are written at once."""
        texts = [""] * len(requests)
        tokens: list[list[int]] = [[] for _ in requests]
        last: dict[int, Part] = {}
        for parts in self.run(requests, processors, rows):
            for part in parts:
                texts[part.row] += part.text
                tokens[part.row] += part.tokens
                last[part.row] = part
        return [
            Completion(texts[i], tokens[i], last[i].finish_reason or "length", request.seed, last[i].stats)
            for i, request in enumerate(requests)
        ]

    def eos_tokens(self) -> tuple[int, ...]:
        """Ids that end a text, as the model's generation config (or config) names them."""
        for config in (self.target.generation_config, self.target.config):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()


def no_room(what: str) -> OutOfMemory:
    free, total = (x / 2**30 for x in torch.cuda.mem_get_info())
    return OutOfMemory(
        f"{what} does not fit: {free:.1f} of {total:.0f} GiB are free; use fewer rows at once or fewer new tokens"
    )
