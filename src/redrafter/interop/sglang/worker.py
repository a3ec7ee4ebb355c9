"""SGLang's speculative worker with our drafter. It runs in every scheduler process, one for each rank.

A step verifies the trees that the step before has drafted. SGLang learns the new lengths before the next trees are
drafted, so that it prepares the next step while the GPU drafts. Between steps nothing is copied to the host.
"""

import functools
import logging
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.tree import Tree
from redrafter.drafters.with_ngrams import WithNgrams
from redrafter.errors import UnsupportedTarget
from redrafter.interop.load import Chooser, bucket, ladder, shape_of
from redrafter.interop.plugged import said
from redrafter.interop.sglang.checks import check
from redrafter.interop.sglang.clock import step_clock
from redrafter.interop.sglang.ranks import Ranks
from redrafter.interop.sglang.recorded import RecordedFollow
from redrafter.interop.sglang.sampler import fill_seeds, make_sampler
from redrafter.interop.sglang.sampling import adjusted, greedy, sampling_of, searching
from redrafter.interop.sglang.settings import Settings
from redrafter.interop.sglang.sizes import SizedRunners
from redrafter.interop.sglang.target import HiddenStates, SglangTarget, drafter_for
from redrafter.interop.sglang.trees import Piece, Requests, TreeBatch
from redrafter.interop.sglang.verify_input import (
    make_inputs,
    move_accepted,
    prepare_verification,
    warm_up_moves,
)

log = logging.getLogger(__name__)

NGRAM_WINDOW = 8192
"""The most recent tokens of a text that n-grams are looked up in."""

_host_lengths = True


def needs_host_lengths() -> bool:
    """Whether the attention backend of the worker made last needs the requests' lengths on the host."""
    return _host_lengths


@functools.cache
def make_worker() -> type:
    """The worker's class. A function, since its base class is SGLang's."""
    from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs
    from sglang.srt.managers.scheduler import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.spec_utils import (
        generate_token_bitmask,
        record_stream_for_v2_verify,
    )

    class Worker(BaseSpecWorker):  # type: ignore[misc]
        def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:  # noqa: ARG002 - SGLang's signature
            self.server_args, self._target_worker = server_args, target_worker
            self.model_runner, self.device = target_worker.model_runner, server_args.device
            self.tp_rank, self.ranks = ps.tp_rank, Ranks(ps.tp_size)
            self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
            with said():
                check(server_args)
                self.settings = Settings.of()
                name = server_args.served_model_name or server_args.model_path
                self.target = SglangTarget(self.model_runner, target_worker.tokenizer, name)
                self.drafter = drafter_for(self.settings.folder, self.target)
                read = (self.drafter.layers, self.target.layer_count, name)
                self.hidden_states = HiddenStates(self.model_runner.model, *read)
                self.context_size = self.target.hidden_size * len(self.drafter.layers)
            if self.settings.rule == "seeded":
                fill_seeds()
                self.model_runner.sampler = make_sampler()()
            self.size = 0  # of the trees that are drafted: an index into `widths`
            self.in_flight: deque[int] = deque(maxlen=16)  # sizes of trees whose results SGLang has not reported yet

        @property
        def draft_worker(self) -> None:
            return None

        def alloc_memory_pool(self, **_: Any) -> None:
            self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
            width = self.speculative_num_draft_tokens
            self.widths = ladder(width) if self.settings.adaptive else [width, 1]
            shapes = [shape_of(w) for w in self.widths]
            if self.settings.shape:
                shapes[0] = replace(Shape.of(self.settings.shape), nodes=width - 1)
            drafter = WithNgrams(self.drafter) if self.settings.ngrams else self.drafter
            slots, longest = self.req_to_token_pool.req_to_token.shape
            with said():
                self.trees = TreeBatch(
                    drafter,
                    shapes,
                    slots=slots,
                    window=min(longest, NGRAM_WINDOW),
                    context_size=self.context_size,
                    vocab_size=self.target.vocab_size,
                    dtype=self.target.dtype,
                    device=self.device,
                )
            self.depth = self.trees.depth + 1
            most = {} if self.settings.adaptive else {"most_tokens": width * bucket(slots)}  # no limit
            self.chooser, self.clock = Chooser(self.widths, **most), step_clock(self.device)

        def init_attention_backends(self) -> None:
            global _host_lengths
            needs = getattr(self.model_runner.attn_backend, "needs_cpu_seq_lens", True)
            _host_lengths = self.settings.host_lengths or needs

        def init_cuda_graphs(self) -> None:
            """Called after SGLang has recorded the verification of the largest tree."""
            self.runners = SizedRunners(self.model_runner, self.server_args, self.widths, self.chooser.most_tokens)
            self.chooser.most_rows = self.runners.most_rows()
            self.recorded = RecordedFollow(self.trees, self.depth, self.context_size, self.target.dtype)
            self.recorded.warm_up(self.chooser.usable)
            warm_up_moves(self.token_to_kv_pool_allocator.get_kvcache(), self.trees.spare, self.device)
            if self.settings.graphs:
                self.recorded.record(
                    self.runners.batch_sizes(), self.chooser.usable, sampled=self.settings.rule == "seeded"
                )
            log.info(
                "redrafter: trees of %s nodes, verification recorded for batches up to %s, %d recordings of drafting",
                self.widths,
                self.chooser.most_rows,
                len(self.recorded.graphs),
            )

        def clear_cache_pool(self) -> None:
            self.trees.reading.clear()

        def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:  # noqa: ARG002 - SGLang's signature
            return True, "the drafter keeps its weights"

        update_weights_from_ipc = update_weights_from_disk

        def update_weights_from_tensor(self, recv_req: Any) -> Any:
            return self._target_worker.update_weights_from_tensor(recv_req)

        def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:  # noqa: ARG002 - SGLang's signature
            if self.in_flight and num_correct_drafts_per_req:
                mean = sum(num_correct_drafts_per_req) / len(num_correct_drafts_per_req)
                self.chooser.accepted(self.in_flight.popleft(), 1 + mean)

        def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
            record_stream_for_v2_verify(batch, None, torch.get_device_module(self.device).current_stream())
            if batch.forward_mode.is_decode():
                return self._decode(batch, on_publish)
            self.clock.interrupted()
            return self._extend(batch, on_publish)

        def _extend(self, batch: Any, on_publish: Any) -> Any:
            self.runners.use(0)  # recorded prompts read the buffers of the backend that SGLang recorded them with
            result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
            chosen, lengths = result.next_token_ids, batch.seq_lens.clone()
            if on_publish is not None:
                on_publish(lengths)
            if batch.reqs and not batch.forward_mode.is_idle():
                pieces = [
                    self._piece(batch, *x) for x in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
                ]
                requests = self._requests(batch, lengths)
                step = self.trees.read(pieces, self._hidden(batch, result), chosen, requests.slots)
                self.recorded(requests, *step, self._usable_size(len(pieces)))
            ones = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
            return self._result(result, chosen, ones, lengths)

        def _piece(self, batch: Any, req: Any, start: int, count: int) -> Piece:
            text, end = req.full_untruncated_fill_ids, start + count
            following = text[end] if req is batch.chunked_req and len(text) > end else None
            tokens = torch.from_numpy(np.asarray(text[:end], dtype=np.int64))  # torch.tensor reads number by number
            tokens = tokens.clamp(max=self.target.vocab_size - 1)  # SGLang numbers images above the vocabulary
            return Piece(req.req_pool_idx, req.rid, tokens, start, following)

        def _decode(self, batch: Any, on_publish: Any) -> Any:
            rows = len(batch.reqs)
            size = self._usable_size(rows)
            # The host knows the texts as they were a step or two ago.
            lengths = [len(r.origin_input_ids) + len(r.output_ids) + 4 * self.depth for r in batch.reqs]
            # No node has a position past the model's last.
            room, last = self.model_runner.model_config.context_len - max(lengths), len(self.widths) - 1
            size = next((s for s in range(size, last) if self.widths[s] <= room), last)
            self.clock.began(rows, size)
            self.in_flight.append(size)
            n, before = self.widths[size], batch.seq_lens
            self.runners.use(size)
            tree = self.ranks.tree(self.trees.tree(batch.req_pool_indices.long(), size))
            prepare_verification(batch, tree, self.model_runner, depth=self.depth, most=sum(lengths))
            spec: Any = batch.spec_info
            on_host = (
                [x.cpu() for x in (spec.retrieve_next_token, spec.retrieve_next_sibling)] if batch.has_grammar else []
            )
            result = self._target_worker.forward_batch_generation(
                batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
            )
            vocab_mask = None
            if batch.has_grammar:
                vocab_mask = generate_token_bitmask(
                    batch.reqs, spec, *on_host, tree.tokens.cpu(), batch.sampling_info.vocab_size
                )
                if vocab_mask is not None:
                    vocab_mask = vocab_mask.to(self.device)
                    batch.sampling_info.vocab_mask = None
            hidden = self._hidden(batch, result).reshape(rows, n, -1)
            accepted, predict, index = self._accept(batch, size, tree, result.logits_output, vocab_mask)
            lens = accepted.count.int()
            after = before + lens
            kv_cache = self.token_to_kv_pool_allocator.get_kvcache()
            move_accepted(kv_cache, batch.out_cache_loc.view(rows, n), accepted.path)
            if batch.return_logprob:
                compute_spec_v2_logprobs(batch, result.logits_output, predict, index, self.depth - 1)
            if on_publish is not None:
                on_publish(after)
            hidden = hidden.gather(1, accepted.path[..., None].expand(-1, -1, hidden.shape[2]))
            if batch.return_hidden_states:  # SGLang reads as many rows for each request as it reads tokens
                result.logits_output.hidden_states = hidden.flatten(0, 1)
            self.size = self._size(rows)
            self.recorded(self._requests(batch, after), accepted.tokens, accepted.count, hidden, self.size)
            self.clock.ended()
            batch.forward_mode = ForwardMode.DECODE
            return self._result(result, accepted.tokens.flatten().int(), lens, after)

        def _accept(
            self, batch: Any, size: int, tree: Tree, output: Any, vocab_mask: Tensor | None
        ) -> tuple[Accepted, Tensor | None, Tensor | None]:
            """What is accepted, `depth` wide. For log-probabilities: choices by node, and SGLang's numbers of nodes."""
            rows, n = tree.tokens.shape
            first = n * torch.arange(rows, device=self.device)[:, None]
            if self.settings.rule == "sglang":
                predict, count, index = eagle_utils.eagle_sample(batch.spec_info, batch, output, vocab_mask)
                path = (index.long() - first).clamp(min=0)
                tokens = predict.view(rows, n).long().gather(1, path)
                return Accepted(path, tokens, count.long(), count.long() - 1, count), predict, index
            logits = adjusted(output.next_token_logits, batch.sampling_info, n)
            if vocab_mask is not None:
                batch.spec_info.grammar.apply_vocab_mask(logits=logits, vocab_mask=vocab_mask)
            output.next_token_logits = logits  # what log-probabilities are computed from
            requests = self._requests(batch, batch.seq_lens, search=False)
            found = self.ranks.accepted(self.trees.accept(requests, size, tree, logits.view(rows, n, -1)))
            more = (0, self.depth - found.path.shape[1])
            found = replace(found, path=pad(found.path, more), tokens=pad(found.tokens, more))
            if not batch.return_logprob:
                return found, None, None
            real = torch.arange(self.depth, device=self.device) < found.count[:, None]
            index = torch.where(real, found.path + first, -1).int()
            # Choices at nodes that are not accepted are never read. Entries after the accepted ones name the root; the
            # root's own choice comes last and stays.
            predict = torch.zeros(rows, n, dtype=torch.long, device=self.device)
            predict.scatter_(1, found.path, found.tokens).scatter_(1, found.path[:, :1], found.tokens[:, :1])
            return found, predict.flatten().int(), index

        def _requests(self, batch: Any, lengths: Tensor, search: bool = True) -> Requests:
            info, slots = batch.sampling_info, batch.req_pool_indices.long()
            seeds = lengths.long()
            if info.is_all_greedy:  # the usual case needs neither seeds nor filters
                return Requests(slots, seeds, seeds, greedy(len(lengths), self.device))
            seeded = self.settings.rule == "seeded"
            sampling = sampling_of(info, self.target.vocab_size)
            if search:
                sampling = searching(sampling.temperature, seeded)
            return Requests(slots, lengths.long(), info.sampling_seed if seeded else seeds, sampling)

        def _hidden(self, batch: Any, result: Any) -> Tensor:
            """The hidden states of the pass; SGLang gets them back only if a request asked for them."""
            hidden = result.logits_output.hidden_states
            if hidden is None:
                raise UnsupportedTarget(
                    "SGLang returned no hidden states; start it with --enable-return-hidden-states, and with a model "
                    "whose hidden states it can return"
                )
            hidden = self.hidden_states(hidden)
            result.logits_output.hidden_states = hidden if batch.return_hidden_states else None
            return hidden

        def _usable_size(self, rows: int) -> int:
            """The size chosen last; the largest usable one if more requests run than when it was chosen."""
            usable = self.chooser.usable(rows)
            return self.size if self.size in usable else usable[0]

        def _size(self, rows: int) -> int:
            for step in self.clock.times():
                self.chooser.took(*step)
            if not self.settings.adaptive:
                return self.chooser.usable(rows)[0]
            size = self.chooser.choose(rows)
            if self.ranks.size > 1:  # times differ between ranks; the batch must not
                size = int(self.ranks.values(torch.tensor([size], device=self.device)))
            return size

        def _result(self, result: Any, tokens: Tensor, accept_lens: Tensor, lengths: Tensor) -> Any:
            return GenerationBatchResult(
                logits_output=result.logits_output,
                next_token_ids=tokens,
                can_run_cuda_graph=result.can_run_cuda_graph,
                accept_lens=accept_lens,
                new_seq_lens=lengths,
                next_draft_input=make_inputs()[1](draft_token_num=self.depth, new_seq_lens=lengths),
                speculative_num_draft_tokens=self.depth,
            )

    return Worker
