"""A small engine that schedules as SGLang does, for CPU tests of `redrafter.interop.sglang`.

Requests share a batch, prompts are read in pieces, prefixes may be cached, requests are retracted and read again, and a
step begins before the results of the step before are known.
"""

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.sglang_stub import ForwardMode, SamplingBatchInfo


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
    hidden: list[Tensor] = field(default_factory=list)  # the hidden states that chose the text's tokens but the first
    read: list[Tensor] = field(default_factory=list)  # the hidden states of the prompt
    logprobs: list[float] = field(default_factory=list)  # of the text's tokens but the first

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


class Engine:
    """Schedules requests over a worker. `chunk` bounds the prompt tokens of a pass, `slots` the running requests."""

    def __init__(
        self,
        worker: Any,
        *,
        slots: int = 4,
        chunk: int = 6,
        returns_hidden: bool = False,
        returns_logprobs: bool = False,
        grammar: bool = False,
    ) -> None:
        self.worker, self.chunk, self.grammar = worker, chunk, grammar
        self.returns_hidden, self.returns_logprobs = returns_hidden, returns_logprobs
        self.free = list(range(1, slots + 1))
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.between: Any = None  # what the worker hands from step to step, a row for each running request
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
        self._filter(self.between, [i for i, r in enumerate(self.running) if r is not req])
        self.running.remove(req)
        self.free.append(req.req_pool_idx)
        req.kv, req.req_pool_idx = [], -1

    def _filter(self, between: Any, keep: list[int]) -> None:
        if keep:
            between.filter_batch(new_indices=torch.tensor(keep), has_been_filtered=False, new_indices_cpu=keep)

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
        if self.returns_hidden:
            for req, rows in zip(reqs, result.logits_output.hidden_states.split(counts), strict=True):
                req.read += rows
        else:
            assert result.logits_output.hidden_states is None, "SGLang would copy them to the host"
        done = [r for r in reqs if r is not chunked]
        keep = [i for i, r in enumerate(reqs) if r is not chunked]
        if done:
            self._filter(result.next_draft_input, keep)
            if self.running:
                self.between.merge_batch(result.next_draft_input)
            else:
                self.between = result.next_draft_input
        self.running += done
        result.next_token_ids, result.accept_lens = result.next_token_ids[keep][:, None], result.accept_lens[keep]
        self.late.append((done, result))

    def decode(self) -> None:
        reqs = list(self.running)
        batch = self._batch(ForwardMode.DECODE, reqs, self.between.new_seq_lens.tolist())
        assert self.between.future_indices.tolist() == batch.req_pool_indices.tolist()
        batch.spec_info = self.between
        result = self._forward(batch)
        self.between = result.next_draft_input
        self.sizes.append(batch.spec_info.draft_token_num)
        stride = result.speculative_num_draft_tokens
        result.next_token_ids = result.next_token_ids.view(len(reqs), stride)
        if self.returns_hidden:
            for req, rows, count in zip(
                reqs, result.logits_output.hidden_states.split(stride), result.accept_lens, strict=True
            ):
                req.hidden += rows[:count]
        else:
            assert result.logits_output.hidden_states is None, "SGLang would copy them to the host"
        if self.returns_logprobs:
            found = result.logits_output.next_token_logprobs.tolist()
            for req, row, count in zip(reqs, found, result.accept_lens.tolist(), strict=True):
                req.logprobs += row[:count]
        assert batch.forward_mode is ForwardMode.DECODE, "SGLang reads the results of this mode's passes"
        assert batch.sampling_info.vocab_mask is None, "SGLang would apply it to another pass"
        result.verified = True
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
            has_grammar=self.grammar,
            return_logprob=self.returns_logprobs,
            return_hidden_states=self.returns_hidden,
            chunked_req=None,
        )
        if self.grammar:
            info.vocab_mask = torch.zeros(0)  # the batch before left one
        info.adjusted_from_schedule_batch(batch, 0)
        return batch

    def _forward(self, batch: Any) -> Any:
        def publish(lengths: Tensor) -> None:
            self.lengths.update(zip([r.rid for r in batch.reqs], lengths.tolist(), strict=True))

        result = self.worker.forward_batch_generation(batch, publish)
        result.next_draft_input.future_indices = batch.req_pool_indices
        assert result.new_seq_lens.tolist() == [self.lengths[r.rid] for r in batch.reqs]
        for req, length in zip(batch.reqs, result.new_seq_lens.tolist(), strict=True):
            req.kv = self.worker.token_to_kv_pool_allocator.get_kvcache().text(req, length)
        return result

    def process(self, everything: bool = False) -> None:
        """Results of earlier passes; the newest one's are not known yet."""
        while len(self.late) > (0 if everything or not self.running else 1):
            reqs, result = self.late.pop(0)
            if getattr(result, "verified", False):
                self.worker.on_verify_complete_cpu((result.accept_lens - 1).tolist(), batch_size=len(reqs))
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
