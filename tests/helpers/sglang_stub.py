"""What `redrafter.interop.sglang` uses of SGLang 0.5.16 (modules, classes, attributes), around a toy model in fp64.

`sglang_engine.py` schedules requests over them.
"""

import sys
import types
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.zoo import VOCAB

VERSION = "0.5.16"
CONTEXT = 96
ROOM = 2 * CONTEXT
"""Cache slots of a request."""
BLOCK_SIZES = "_get_block_sizes_for_extend_attention"


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
    """SGLang's recorded passes for one size of tree; here only their sizes, and the room for masks."""

    def __init__(self, runner: Any, *, speculative_num_draft_tokens: int, attn_backend: Any = None, **_: Any) -> None:
        assert runner.server_args.speculative_num_draft_tokens == speculative_num_draft_tokens, "SGLang looks there too"
        self.capture_bs = list(runner.server_args.cuda_graph_config.decode.bs)
        self.max_bs, self.width = max(self.capture_bs), speculative_num_draft_tokens
        self.tiles = getattr(sys.modules["sglang.kernels.ops.attention"].extend_attention, BLOCK_SIZES)(128, 128)
        room = torch.zeros(self.max_bs * self.width * CONTEXT, dtype=torch.uint8)
        (attn_backend or runner.attn_backend).cuda_graph_custom_mask = room


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
    vocab_mask: Tensor | None = None
    vocab_size: int = VOCAB

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
        assert name not in ALGORITHMS, "SGLang refuses a name that it knows"

        def add(factory: Any) -> Any:
            ALGORITHMS[name] = spec_class(name, factory, supports_overlap=supports_overlap)
            return factory

        return add


SAMPLERS: dict[str, Any] = {}
GROUP = SimpleNamespace(world_size=1, broadcast=lambda values, src: None)
"""The ranks of a tensor-parallel engine. A test may be one of several."""


def reconstruct_indices_from_tree_mask(
    mask: Tensor, lengths: Tensor, positions: Tensor, index: Tensor, child: Tensor, sibling: Tensor, rows: int, n: int
) -> None:
    """A tree's positions, and its links: the number of each node, its first child and its next sibling, or -1."""
    trees = mask.view(rows, n, n)
    positions.copy_((trees.sum(-1) - 1 + lengths[:, None]).flatten())
    index.copy_(torch.arange(rows * n).view(rows, n))
    child.fill_(-1)
    sibling.fill_(-1)
    for row, tree in enumerate(trees.tolist()):
        newest: dict[int, int] = {}  # parent -> the last child found
        for node in range(1, n):
            above = [j for j in range(n) if tree[node][j] and j != node]
            parent = max(above, key=lambda j: sum(tree[j]))
            if parent in newest:
                sibling[row, newest[parent]] = node
            else:
                child[row, parent] = node
            newest[parent] = node


def eagle_sample(spec: Any, batch: Any, output: Any, vocab_mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """SGLang's own rule, greedy: follow the target's choices down the links."""
    rows, n = len(batch.reqs), spec.draft_token_num
    if vocab_mask is not None:
        spec.grammar.apply_vocab_mask(logits=output.next_token_logits, vocab_mask=vocab_mask)
    choice = output.next_token_logits.argmax(-1).int()
    index, counts = torch.full((rows, spec.max_tree_depth), -1, dtype=torch.int32), []
    for row in range(rows):
        path, node = [0], int(spec.retrieve_next_token[row, 0])
        while node >= 0:
            if batch.input_ids[row * n + node] == choice[row * n + path[-1]]:
                path.append(node)
                node = int(spec.retrieve_next_token[row, node])
            else:
                node = int(spec.retrieve_next_sibling[row, node])
        index[row, : len(path)] = torch.tensor(path) + row * n
        counts.append(len(path))
    return choice, torch.tensor(counts, dtype=torch.int32), index


class KvCache:
    """The token whose keys are in each cache slot. A request's text begins in slot `ROOM * pool index`."""

    def __init__(self) -> None:
        self.tokens = torch.full((9 * ROOM,), -1)

    def text(self, req: Any, length: int) -> list[int]:
        return self.tokens[ROOM * req.req_pool_idx :][:length].tolist()

    def move_kv_cache(self, places: Tensor, sources: Tensor) -> None:
        """Copies of one call may run in any order. Here the last one runs first, as a GPU may do it."""
        assert len(set(places.tolist())) == len(places), "a slot gets one value in a call"
        assert all(x.is_contiguous() for x in (places, sources)), "SGLang's kernel reads them by address"
        for place, source in reversed(list(zip(places.tolist(), sources.tolist(), strict=True))):
            self.tokens[place] = self.tokens[source]


def compute_spec_v2_logprobs(batch: Any, output: Any, predict: Tensor, index: Tensor, steps: int) -> None:
    """As SGLang does it, where all temperatures are 1."""
    at = index.long().reshape(-1)
    scores, rows = output.next_token_logits[at].log_softmax(-1), len(batch.reqs)
    output.next_token_logprobs = scores[torch.arange(rows * (steps + 1)), predict[at].long()].view(rows, steps + 1)


class Grammar:
    """Even tokens follow odd ones, and odd tokens even ones."""

    @staticmethod
    def allowed(tokens: Tensor) -> Tensor:
        return tokens[..., None] % 2 != torch.arange(VOCAB) % 2

    @staticmethod
    def apply_vocab_mask(*, logits: Tensor, vocab_mask: Tensor) -> None:
        logits.masked_fill_(~vocab_mask, -torch.inf)


def generate_token_bitmask(
    reqs: list[Any], spec: Any, child: Tensor, sibling: Tensor, tokens: Tensor, vocab_size: int
) -> Tensor:
    """What may follow each node, one after the other."""
    assert child.shape == sibling.shape == tokens.shape
    assert vocab_size == VOCAB
    spec.grammar = Grammar
    return Grammar.allowed(tokens.flatten())


def cache_slots(
    *, req_pool_indices: Tensor, start_offset: Tensor, end_offset: Tensor, draft_token_num: int, **_: Any
) -> Tensor:
    assert (end_offset - start_offset == draft_token_num).all(), "SGLang reads its slots from the one to the other"
    return ((ROOM * req_pool_indices + start_offset)[:, None] + torch.arange(draft_token_num)).flatten()


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> None:
    """Put the stub's modules where Python looks for SGLang's."""
    ALGORITHMS.clear()
    SAMPLERS.clear()
    monkeypatch.setattr(
        SamplingBatchInfo, "adjusted_from_schedule_batch", SamplingBatchInfo.adjusted_from_schedule_batch
    )  # the plug-in replaces it
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": version},
        "sglang.kernels.ops.attention": {
            "extend_attention": SimpleNamespace(**{BLOCK_SIZES: lambda q, v: (q, 0, v, 128, 64, 8)})
        },
        "sglang.kernels.ops.speculative.cache_locs": {"assign_extend_cache_locs_func": cache_slots},
        "sglang.srt.arg_groups.speculative_hook": {"_handle_ngram": lambda _: None},
        "sglang.srt.distributed": {"get_tp_group": lambda: GROUP},
        "sglang.srt.layers.logprob_processor": {"compute_spec_v2_logprobs": compute_spec_v2_logprobs},
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
        "sglang.srt.speculative": {"eagle_utils": SimpleNamespace(eagle_sample=eagle_sample)},
        "sglang.srt.speculative.base_spec_worker": {"BaseSpecWorker": BaseSpecWorker},
        "sglang.srt.speculative.ngram_info": {"NgramVerifyInput": NgramVerifyInput},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo, "get_spec": ALGORITHMS.get},
        "sglang.srt.speculative.spec_utils": {
            "generate_token_bitmask": generate_token_bitmask,
            "record_stream_for_v2_verify": lambda *_: None,
        },
        "sgl_kernel.speculative": {"reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask},
    }
    packages = {".".join(name.split(".")[:i]) for name in contents for i in range(1, name.count(".") + 2)}
    for name in sorted(packages):
        module = types.ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


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
        config = SimpleNamespace(hf_text_config=model.config, context_len=CONTEXT)
        self.model_runner = SimpleNamespace(
            model=split,
            model_config=config,
            sampler=Sampler(),
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=False),
            decode_cuda_graph_runner=None,
            init_new_workspace=False,
            _get_attention_backend=self.attention,
        )
        self.returns_hidden, self.recorded, self.kv_cache = True, 0, KvCache()
        self.own = self.model_runner.attn_backend

    def attention(self, init_new_workspace: bool = False) -> Any:
        self.model_runner.init_new_workspace = init_new_workspace
        return SimpleNamespace(needs_cpu_seq_lens=False, own_workspace=init_new_workspace)

    def get_memory_pool(self) -> tuple[Any, Any]:
        return SimpleNamespace(req_to_token=torch.zeros(9, 128)), SimpleNamespace(get_kvcache=lambda: self.kv_cache)

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
        assert self.model_runner.attn_backend is self.own, "SGLang recorded its prompts with its own backend"
        logits, hidden = [], []
        for req, start, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            req.kv = list(req.full_untruncated_fill_ids[: start + count])
            self.kv_cache.tokens[ROOM * req.req_pool_idx :][: start + count] = torch.tensor(req.kv)
            all_logits, states = self.run([req.kv])
            logits.append(all_logits[0, -1])
            if batch.sampling_info.vocab_mask is not None:
                Grammar.apply_vocab_mask(logits=logits[-1], vocab_mask=Grammar.allowed(torch.tensor(req.kv[-1])))
            hidden.append(states[0, start:])
        return SimpleNamespace(next_token_logits=torch.stack(logits), hidden_states=torch.cat(hidden))

    def _verify(self, batch: Any) -> Any:
        """Every node sees what the flat mask shows it, in the order of positions."""
        spec, rows, recorded = batch.spec_info, len(batch.reqs), self.model_runner.decode_cuda_graph_runner
        n = spec.draft_token_num
        if recorded is not None:
            assert recorded.width == n, "the pass was recorded for another size of tree"
            if rows <= recorded.max_bs:
                self.recorded += 1
                assert len(spec.custom_mask) <= len(self.model_runner.attn_backend.cuda_graph_custom_mask)
        tokens, positions = batch.input_ids.view(rows, n), spec.positions.view(rows, n)
        assert positions.max() < CONTEXT, "the model has no such position"
        self.kv_cache.tokens[batch.out_cache_loc] = batch.input_ids
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
