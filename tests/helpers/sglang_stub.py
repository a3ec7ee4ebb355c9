"""A small engine with SGLang's interfaces, for CPU tests of `redrafter.interop.sglang`.

It has the modules, classes and attributes of SGLang 0.5.16 that the plug-in uses, and runs a toy model in fp64. It
schedules as SGLang does: requests share a batch, prompts are read in pieces, prefixes may be cached, requests are
retracted and read again, and a step begins before the results of the step before are known.
"""

import sys
import types
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VERSION = "0.5.16"


class ForwardMode(IntEnum):
    EXTEND, DECODE, TARGET_VERIFY = range(3)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return False


class CaptureHiddenMode(IntEnum):
    NULL, LAST, FULL = range(3)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.org_vocab_size = nn.Parameter(weight, requires_grad=False), len(weight)


class ParallelLMHead(VocabParallelEmbedding):
    pass


class GraphRunner:
    """SGLang's recorded passes for one size of tree; here only their sizes."""

    def __init__(self, runner: Any, *, speculative_num_draft_tokens: int, **_: Any) -> None:
        self.capture_bs = list(runner.server_args.cuda_graph_config.decode.bs)
        self.max_bs, self.width = max(self.capture_bs), speculative_num_draft_tokens


class BaseSpecWorker:
    @property
    def target_worker(self) -> Any:
        return self._target_worker  # type: ignore[attr-defined]


class NgramVerifyInput:
    def __init__(self, **given: Any) -> None:
        self.future_indices = self.new_seq_lens = self.accept_tokens = self.accept_lens = None
        vars(self).update(given)


@dataclass
class SamplingBatchInfo:
    temperatures: Tensor
    top_ps: Tensor
    top_ks: Tensor
    min_ps: Tensor
    is_all_greedy: bool
    need_top_p_sampling: bool
    need_top_k_sampling: bool
    need_min_p_sampling: bool
    sampling_seed: Tensor | None = None
    acc_additive_penalties: Tensor | None = None
    acc_scaling_penalties: Tensor | None = None
    logit_bias: Tensor | None = None

    def adjusted_from_schedule_batch(self, batch: Any, vocab_size: int) -> None:
        pass


class Sampler(nn.Module):
    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
        return logits

    def forward(self, output: Any, info: Any, _: bool, __: list[int], ___: list[int], positions: Tensor) -> Tensor:
        logits = self._preprocess_logits(output.next_token_logits, info)
        if info.is_all_greedy:
            return logits.argmax(-1)
        return self._sample_from_probs((logits / info.temperatures).softmax(-1), info, positions, True)

    def _sample_from_probs(self, probs: Tensor, *_: Any) -> Tensor:
        return torch.multinomial(probs, 1)[:, 0]


class CustomSpecAlgo:
    def __init__(self, name: str, factory: Any, **_: Any) -> None:
        self.name, self.factory = name, factory


ALGORITHMS: dict[str, CustomSpecAlgo] = {}


class SpeculativeAlgorithm:
    @classmethod
    def register(cls, name: str, *, supports_overlap: bool, spec_class: Any) -> Any:
        def add(factory: Any) -> Any:
            ALGORITHMS[name] = spec_class(name, factory, supports_overlap=supports_overlap)
            return factory

        return add


SAMPLERS: dict[str, Any] = {}


def reconstruct_indices_from_tree_mask(
    mask: Tensor, lengths: Tensor, positions: Tensor, *_: Any
) -> None:  # the links between nodes are for SGLang's own rule
    rows, n = len(lengths), len(positions) // len(lengths)
    positions.copy_((mask.view(rows, n, n).sum(-1) - 1 + lengths[:, None]).flatten())


def move_accepted(batch: Any, index: Tensor, drafted: Tensor, allocator: Any) -> None:
    """Commit the accepted nodes, as SGLang moves their keys and values."""
    for req, row, count in zip(batch.reqs, index, drafted, strict=True):
        nodes = row[: int(count) + 1]
        assert (nodes >= 0).all()
        req.kv.extend(batch.input_ids[nodes.long()].tolist())


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> None:
    """Put the stub's modules where Python looks for SGLang's."""
    ALGORITHMS.clear()
    SAMPLERS.clear()
    monkeypatch.setattr(
        SamplingBatchInfo, "adjusted_from_schedule_batch", SamplingBatchInfo.adjusted_from_schedule_batch
    )  # the plug-in replaces it
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": version},
        "sglang.kernels.ops.speculative.cache_locs": {"assign_extend_cache_locs_func": lambda **_: None},
        "sglang.srt.arg_groups.speculative_hook": {"_handle_ngram": lambda _: None},
        "sglang.srt.distributed": {"get_tp_group": lambda: SimpleNamespace(world_size=1)},
        "sglang.srt.layers.logprob_processor": {"compute_spec_v2_logprobs": None},
        "sglang.srt.layers.sampler": {"Sampler": Sampler, "register_sampler_backend": SAMPLERS.__setitem__},
        "sglang.srt.layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": VocabParallelEmbedding,
            "ParallelLMHead": ParallelLMHead,
        },
        "sglang.srt.managers.overlap_utils": {"FutureMap": lambda *given, **_: given},
        "sglang.srt.managers.scheduler": {"GenerationBatchResult": lambda **given: SimpleNamespace(**given)},
        "sglang.srt.model_executor.forward_batch_info": {
            "CaptureHiddenMode": CaptureHiddenMode,
            "ForwardMode": ForwardMode,
        },
        "sglang.srt.model_executor.runner": {"DecodeCudaGraphRunner": GraphRunner},
        "sglang.srt.sampling.sampling_batch_info": {"SamplingBatchInfo": SamplingBatchInfo},
        "sglang.srt.speculative": {"eagle_utils": SimpleNamespace()},
        "sglang.srt.speculative.base_spec_worker": {"BaseSpecWorker": BaseSpecWorker},
        "sglang.srt.speculative.ngram_info": {"NgramVerifyInput": NgramVerifyInput},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo, "get_spec": ALGORITHMS.get},
        "sglang.srt.speculative.spec_utils": {
            "generate_token_bitmask": None,
            "move_accept_tokens_to_target_kvcache": move_accepted,
            "record_stream_for_v2_verify": lambda *_: None,
        },
        "sgl_kernel.speculative": {"reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask},
    }
    packages = {".".join(name.split(".")[:i]) for name in contents for i in range(1, name.count(".") + 2)}
    for name in sorted(packages):
        module = types.ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


@dataclass(frozen=True)
class Params:
    temperature: float = 0.0
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0
    sampling_seed: int | None = None


@dataclass(eq=False)
class Req:
    rid: str
    origin_input_ids: list[int]
    params: Params
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)  # as far as results are known
    kv: list[int] = field(default_factory=list)  # tokens whose keys are in the cache
    req_pool_idx: int = -1
    steps: int = 0

    @property
    def sampling_params(self) -> Params:
        """As SGLang normalises them: temperature 0 is top-k 1 at temperature 1."""
        if self.params.temperature > 0:
            return self.params
        return Params(temperature=1.0, top_k=1, sampling_seed=self.params.sampling_seed)

    @property
    def full_untruncated_fill_ids(self) -> array:
        return array("q", self.origin_input_ids + self.output_ids)

    @property
    def finished(self) -> bool:
        return len(self.output_ids) >= self.max_new_tokens


class Inner(nn.Module):
    """A model without its head. It returns hidden states of earlier layers, as inputs of layers, if asked for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.run, self.layers_to_capture = model.model, list[int]()

    def forward(self, ids: Tensor) -> Any:
        found = self.run(ids, output_hidden_states=True)
        if not self.layers_to_capture:
            return found.last_hidden_state
        return found.last_hidden_state, [found.hidden_states[i] for i in self.layers_to_capture]


class Model(nn.Module):
    """SGLang's model: embeddings of its own classes, and its way to hand out hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(model.get_input_embeddings().weight.data)
        self.head = ParallelLMHead(model.get_output_embeddings().weight.data)
        self.model, self.capture_aux_hidden_states = Inner(model), False

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [i + 1 for i in layer_ids]

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden, earlier = self.model(ids), None
        if self.capture_aux_hidden_states:
            hidden, earlier = hidden
        return hidden @ self.head.weight.T, hidden if earlier is None else torch.cat(earlier, -1)


class TargetWorker:
    """Runs the toy model. It knows a request's text only by the tokens in its cache and in the pass."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        split = Model(model)
        config = SimpleNamespace(hf_text_config=model.config)
        self.model_runner = SimpleNamespace(
            model=split,
            model_config=config,
            sampler=Sampler(),
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=False),
            decode_cuda_graph_runner=None,
            _get_attention_backend=lambda **_: SimpleNamespace(needs_cpu_seq_lens=False),
        )
        self.returns_hidden, self.recorded = True, 0

    def get_memory_pool(self) -> tuple[Any, Any]:
        return SimpleNamespace(req_to_token=torch.zeros(9, 128)), None

    @torch.no_grad()
    def run(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Logits and hidden states (texts, longest, ...) of token sequences, each padded at its end."""
        longest = max(map(len, texts))
        ids = torch.tensor([t + [0] * (longest - len(t)) for t in texts])
        return self.model_runner.model(ids)  # type: ignore[no-any-return]

    def forward_batch_generation(self, batch: Any, is_verify: bool = False, **asked: Any) -> Any:
        assert asked["capture_hidden_mode"] is CaptureHiddenMode.FULL
        output = self._verify(batch) if is_verify else self._extend(batch)
        tokens = None
        if not is_verify:
            tokens = self.model_runner.sampler(output, batch.sampling_info, False, [], [], batch.seq_lens - 1)
        if not self.returns_hidden:
            output.hidden_states = None
        return SimpleNamespace(logits_output=output, next_token_ids=tokens, can_run_cuda_graph=False)

    def _extend(self, batch: Any) -> Any:
        logits, hidden = [], []
        for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            req.kv = list(req.full_untruncated_fill_ids[: start + count])
            all_logits, states = self.run([req.kv])
            logits.append(all_logits[0, -1])
            hidden.append(states[0, start:])
        return SimpleNamespace(next_token_logits=torch.stack(logits), hidden_states=torch.cat(hidden))

    def _verify(self, batch: Any) -> Any:
        """Every node sees what the flat mask shows it, in the order of positions."""
        spec, rows, recorded = batch.spec_info, len(batch.reqs), self.model_runner.decode_cuda_graph_runner
        n = spec.draft_token_num
        if recorded is not None:
            assert recorded.width == n, "the pass was recorded for another size of tree"
            self.recorded += rows <= recorded.max_bs
        tokens, positions = batch.input_ids.view(rows, n), spec.positions.view(rows, n)
        texts, at = [], 0
        for req, own, where in zip(batch.reqs, tokens.tolist(), positions.tolist(), strict=True):
            size = len(req.kv) + n
            mask = spec.custom_mask[at : at + n * size].view(n, size)
            at += n * size
            assert mask[:, : len(req.kv)].all()
            for node, row in enumerate(mask[:, len(req.kv) :]):
                seen = [own[j] for j in range(n) if row[j] and j != node]
                assert where[node] == len(req.kv) + int(row.sum()) - 1
                texts.append([*req.kv, *seen, own[node]])
        logits, hidden = self.run(texts)
        ends = torch.tensor([len(t) - 1 for t in texts])
        each = torch.arange(len(texts))
        return SimpleNamespace(next_token_logits=logits[each, ends], hidden_states=hidden[each, ends])


class Engine:
    """Schedules requests over a worker. `chunk` bounds the prompt tokens of a pass, `slots` the running requests."""

    def __init__(self, worker: Any, *, slots: int = 4, chunk: int = 6) -> None:
        self.worker, self.chunk = worker, chunk
        self.free = list(range(1, slots + 1))
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.lengths: dict[str, int] = {}  # published
        self.late: list[tuple[list[Req], Any]] = []  # results that are not processed yet
        self.accepted: list[int] = []  # drafted tokens of every request's step
        self.sizes: list[int] = []  # nodes of every step
        self.cached: dict[str, int] = {}  # request -> tokens of its prompt that a prefix cache holds

    def finish(self, retract: dict[str, int] | None = None) -> None:
        """Run until all requests are done. `retract`: request -> the pass before which it loses its cache, or later."""
        victims = dict(retract or {})
        for number in range(1000):
            self.process()
            for req in [r for r in self.running if victims.get(r.rid, 1000) <= number]:
                self.process(everything=True)
                if req in self.running:
                    del victims[req.rid]
                    self._leave(req)
                    self.waiting.insert(0, req)
            if not (self.waiting or self.running):
                assert not victims
                return
            reads = self.waiting and (self.free or self.waiting[0].req_pool_idx >= 0)
            self.extend() if reads else self.decode()
        raise AssertionError("the engine does not come to an end")

    def _leave(self, req: Req) -> None:
        self.running.remove(req)
        self.free.append(req.req_pool_idx)
        req.kv, req.req_pool_idx = [], -1

    def extend(self) -> None:
        """One pass over the beginnings of waiting requests; the last one's prompt may end in a later pass."""
        room, reqs, prefixes, counts, chunked = self.chunk, [], [], [], None
        for req in list(self.waiting):
            if not room or (req.req_pool_idx < 0 and not self.free):
                break
            whole = len(req.full_untruncated_fill_ids)
            start = len(req.kv) or min(self.cached.get(req.rid, 0), whole - 1)
            count = min(room, whole - start)
            if req.req_pool_idx < 0:
                req.req_pool_idx = self.free.pop(0)
            reqs.append(req)
            prefixes.append(start)
            counts.append(count)
            room -= count
            if start + count < whole:
                chunked = req
            else:
                self.waiting.remove(req)
        batch = self._batch(ForwardMode.EXTEND, reqs, [a + b for a, b in zip(prefixes, counts, strict=True)])
        batch.prefix_lens, batch.extend_lens, batch.chunked_req = prefixes, counts, chunked
        result = self._forward(batch)
        done = [r for r in reqs if r is not chunked]
        self.running += done
        keep = [i for i, r in enumerate(reqs) if r is not chunked]
        result.next_token_ids, result.accept_lens = result.next_token_ids[keep][:, None], result.accept_lens[keep]
        self.late.append((done, result))

    def decode(self) -> None:
        reqs = list(self.running)
        batch = self._batch(ForwardMode.DECODE, reqs, [self.lengths[r.rid] for r in reqs])
        result = self._forward(batch)
        self.sizes.append(batch.spec_info.draft_token_num)
        stride = result.speculative_num_draft_tokens
        result.next_token_ids = result.next_token_ids.view(len(reqs), stride)
        self.worker.on_verify_complete_cpu((result.accept_lens - 1).tolist(), batch_size=len(reqs))
        self.late.append((reqs, result))

    def _batch(self, mode: ForwardMode, reqs: list[Req], lengths: list[int]) -> Any:
        params = [r.sampling_params for r in reqs]
        info = SamplingBatchInfo(
            temperatures=torch.tensor([[p.temperature] for p in params]),
            top_ps=torch.tensor([p.top_p for p in params]),
            top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32),
            min_ps=torch.tensor([p.min_p for p in params]),
            is_all_greedy=all(p.top_k <= 1 for p in params),
            need_top_p_sampling=any(p.top_p != 1 for p in params),
            need_top_k_sampling=any(p.top_k != 1 << 30 for p in params),
            need_min_p_sampling=any(p.min_p > 0 for p in params),
        )
        batch = SimpleNamespace(
            forward_mode=mode,
            reqs=reqs,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=None,
            req_pool_indices=torch.tensor([r.req_pool_idx for r in reqs]),
            req_to_token_pool=SimpleNamespace(req_to_token=None),
            sampling_info=info,
            spec_info=None,
            has_grammar=False,
            return_logprob=False,
            return_hidden_states=False,
            chunked_req=None,
        )
        info.adjusted_from_schedule_batch(batch, 0)
        return batch

    def _forward(self, batch: Any) -> Any:
        def publish(lengths: Tensor) -> None:
            self.lengths.update(zip([r.rid for r in batch.reqs], lengths.tolist(), strict=True))

        result = self.worker.forward_batch_generation(batch, publish)
        assert result.new_seq_lens.tolist() == [self.lengths[r.rid] for r in batch.reqs]
        assert [len(r.kv) for r in batch.reqs] == result.new_seq_lens.tolist()
        return result

    def process(self, everything: bool = False) -> None:
        """Results of earlier passes; the newest one's are not known yet."""
        while len(self.late) > (0 if everything or not self.running else 1):
            reqs, result = self.late.pop(0)
            for req, tokens, count in zip(
                reqs, result.next_token_ids.tolist(), result.accept_lens.tolist(), strict=True
            ):
                if req.finished or req not in self.running:
                    continue
                req.output_ids += tokens[:count]
                req.steps += 1
                self.accepted.append(count - 1)
                if req.finished:
                    del req.output_ids[req.max_new_tokens :]
                    self._leave(req)
