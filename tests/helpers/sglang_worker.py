"""The plug-in's worker for SGLang on the stub, and requests that it writes."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from redrafter import Engine, Shape
from redrafter.drafters.none import NoDrafter
from redrafter.interop.sglang import plugin, settings, verify_input, worker
from tests.helpers import sglang_engine
from tests.helpers import sglang_stub as stub
from tests.helpers.zoo import PROMPTS, VOCAB, recurrent_drafter

TOKENS = 12
WIDTH = 8
MEMORY = {"memory_heads": 2, "memory_size": 8, "first_state": "context"}
LAYERS = {"layers": (-1, 1), "context_size": 64}
"""The order is not the model's."""


@dataclass(frozen=True)
class Tail:
    tokens: torch.Tensor  # (B, 3) the last tokens of each text


class KnowingDrafter:
    """Finds the end of a text in known texts and guesses what follows there; every fourth guess is wrong."""

    layers = (-1,)
    default_shape = Shape(width=2, length=4)

    def __init__(self, texts: list[list[int]]) -> None:
        self.follows = {tuple(t[i - 3 : i]): t[i:] for t in texts for i in range(3, len(t))}
        self.drafts = 0

    def begin(self, tokens, lengths, hidden, slots):
        return Tail(torch.full((len(tokens), 3), -1))

    def advance(self, state, accepted, hidden):
        text = torch.cat([state.tokens, accepted.tokens], 1)
        return Tail(text.gather(1, accepted.count[:, None] + torch.arange(3)))

    def draft(self, state, last, search):
        beam = torch.zeros(len(last), 2, search.shape.length, dtype=torch.long)
        for row, tail in zip(beam, state.tokens.tolist(), strict=True):
            self.drafts += 1
            known = self.follows.get(tuple(tail), [])[: search.shape.length]
            row[1, : len(known)] = torch.tensor(known)  # the second candidate, so that paths are not node numbers
            row[0, 0] = (row[1, 0] + 1) % VOCAB
            row[1, -1] += self.drafts % 4 == 0
        scores = -torch.arange(2.0)[:, None] - torch.arange(search.shape.length) / 10
        return search.candidates(beam % VOCAB, scores.expand(beam.shape), last)


def make_worker(target, monkeypatch, width: int | None = WIDTH, drafter_is=None, batches=(), ranks: int = 1, **given):
    """The plug-in's worker on the stub, as SGLang makes it; `batches`: sizes of recorded passes."""
    stub.install(monkeypatch)
    worker.make_worker.cache_clear()
    verify_input.make_inputs.cache_clear()
    monkeypatch.setenv(settings.VARIABLE, json.dumps(given))
    monkeypatch.setattr(
        worker, "drafter_for", lambda name, own: drafter_is or recurrent_drafter(target, **MEMORY, **LAYERS)
    )
    plugin.register()
    algorithm = stub.ALGORITHMS["REDRAFTER"]
    args = server_args(speculative_num_draft_tokens=width)
    args.override = lambda source, **changes: vars(args).update(changes)
    args.cuda_graph_config.decode.bs = list(batches)
    algorithm.handle_server_args(args)
    own = stub.TargetWorker(target.model)
    own.model_runner.server_args = args
    if batches:
        own.model_runner.decode_cuda_graph_runner = stub.GraphRunner(
            own.model_runner, speculative_num_draft_tokens=args.speculative_num_draft_tokens
        )
    made = algorithm.factory(args)(
        server_args=args, gpu_id=0, ps=SimpleNamespace(tp_rank=0, tp_size=ranks), nccl_port=0, target_worker=own
    )
    made.alloc_memory_pool(memory_pool_config=None)
    made.init_attention_backends()
    made.init_cuda_graphs()
    assert algorithm.create_future_map("cpu", "pool")[3] is False, "the step waits for lengths on the host"
    return made


def plain_texts(target, prompts=PROMPTS, tokens: int = TOKENS) -> dict[tuple[float, int], list[int]]:
    """Texts of the prompts by (temperature, seed), written by redrafter's own engine without a drafter."""
    engine, texts = Engine(target, NoDrafter()), {}
    for temperature in (0.0, 1.0):
        for seed, prompt in enumerate(prompts):
            written = engine.generate(prompt, temperature=temperature, seed=seed, max_new_tokens=tokens)
            texts[temperature, seed] = written.tokens
    return texts


def server_args(**changes):
    given = {
        "device": "cpu",
        "enable_return_hidden_states": True,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "served_model_name": None,
        "model_path": "toy",
        "speculative_num_draft_tokens": WIDTH,
        "speculative_num_steps": 1,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(bs=[])),
    }
    return SimpleNamespace(**(given | changes))


def write(
    made, temperature: float, *, retract=None, cached=None, mixed=False, prompts=PROMPTS, tokens: int = TOKENS, **engine
):
    """Texts of all prompts by seed, more requests than slots; and the engine that wrote them."""
    run = sglang_engine.Engine(made, **engine)
    requests = []
    for seed, prompt in enumerate(prompts):
        own = 0.0 if mixed and seed % 2 else temperature
        params = sglang_engine.Params(temperature=own, sampling_seed=seed)
        requests.append(sglang_engine.Req(f"request-{seed}", list(prompt), params, tokens - seed))
    run.cached = cached or {}
    run.waiting = list(requests)
    run.finish(retract)
    return requests, run


def check(requests, plain) -> None:
    for seed, req in enumerate(requests):
        assert req.output_ids == plain[req.params.temperature, seed][: req.max_new_tokens], (seed, req.params)
