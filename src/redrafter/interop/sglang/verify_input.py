"""Trees as SGLang verifies them: tokens, positions, cache slots, the mask that its attention reads; what is kept."""

import functools
from typing import Any

import torch
from torch import Tensor

from redrafter.core.tree import Tree

TOGETHER = 32
"""Most keys or values in a call of SGLang's move: compiled for 128, its kernel spills registers to memory."""


@functools.cache
def make_inputs() -> tuple[type, type]:
    """The classes of a step's input and of what is carried between steps; their base class is SGLang's."""
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    class VerifyInput(NgramVerifyInput):  # type: ignore[misc]
        """A tree to verify. Texts grow by at most `depth` tokens, however many nodes the tree has."""

        depth: int

        @property
        def max_tree_depth(self) -> int:
            return self.depth

    class Between(NgramVerifyInput):  # type: ignore[misc]
        """What SGLang carries from step to step. The drafter's own state stays in its slots."""

        def filter_batch(self, new_indices: Tensor, *_: Any, **__: Any) -> None:
            for name in ("future_indices", "new_seq_lens"):
                if getattr(self, name) is not None:
                    setattr(self, name, getattr(self, name)[new_indices])

        def merge_batch(self, spec_info: Any) -> None:
            for name in ("future_indices", "new_seq_lens"):
                mine, other = getattr(self, name), getattr(spec_info, name)
                if mine is not None and other is not None:
                    setattr(self, name, torch.cat([mine, other]))

    return VerifyInput, Between


def prepare_verification(batch: Any, tree: Tree, runner: Any, *, depth: int, most: int) -> None:
    """Turn SGLang's batch into one that verifies these trees; `most` is at least the sum of the texts' lengths."""
    from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows, n = tree.tokens.shape
    tokens, device = tree.tokens.flatten(), tree.tokens.device
    positions = torch.empty(rows * n, dtype=torch.long, device=device)
    links = [torch.empty(rows, n, dtype=torch.long, device=device) for _ in range(3)]
    reconstruct_indices_from_tree_mask(tree.mask.flatten(), batch.seq_lens, positions, *links, rows, n)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.input_ids = tokens
    batch.out_cache_loc = assign_extend_cache_locs_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=batch.req_to_token_pool.req_to_token,
        start_offset=batch.seq_lens,
        end_offset=batch.seq_lens + n,
        batch_size=rows,
        draft_token_num=n,
        device=device,
    )
    numbers = (most + rows * n) * n
    recorded = runner.decode_cuda_graph_runner
    room = getattr(runner.attn_backend, "cuda_graph_custom_mask", None)
    if room is not None and recorded is not None and rows <= recorded.max_bs:
        numbers = min(numbers, room.numel())  # a recorded pass copies the mask there
    batch.spec_info = make_inputs()[0](
        draft_token=tokens,
        custom_mask=full_mask(tree.mask, batch.seq_lens, numbers),
        positions=positions,
        retrieve_index=links[0],
        retrieve_next_token=links[1],
        retrieve_next_sibling=links[2],
        draft_token_num=n,
    )
    batch.spec_info.depth = depth


def move_accepted(kv_cache: Any, slots: Tensor, path: Tensor) -> None:
    """Move the keys and values of accepted nodes to the cache slots that follow the text.

    `slots` (B, n) are the cache slots of a tree's nodes. `path` (B, D) are the accepted nodes, then the root, which is
    copied to slots that the next step overwrites.

    One call of SGLang's function moves one depth of at most `TOGETHER` paths. Within a call, its kernel may write a
    slot before another warp has read it. Over calls, a slot is read before it is written: a path is in depth order.
    """
    rows, most = len(path), min(path.shape[1], slots.shape[1])
    if most == 1:  # the root is in its place
        return
    moves = slots.new_empty(2, most, rows + rows % 2)[..., :rows]  # Triton compiles anew for addresses not aligned
    moves[0] = slots[:, :most].T
    moves[1] = slots.gather(1, path[:, :most]).T
    for depth in zip(*(x.unbind()[1:] for x in moves), strict=True):
        for places, sources in zip(*(x.split(TOGETHER) for x in depth), strict=True):
            kv_cache.move_kv_cache(places, sources)


def warm_up_moves(kv_cache: Any, most_rows: int, device: Any) -> None:
    """Have SGLang compile its move of keys and values for up to so many requests; nothing is moved.

    Triton compiles it for each power of two that the number of requests is rounded up to, and for multiples of 16.
    """
    numbers = range(1, min(most_rows, TOGETHER) + 1)
    kinds = {((rows - 1).bit_length(), rows % 16 == 0): rows for rows in numbers}
    for rows in kinds.values():
        slots = torch.arange(rows, device=device)
        kv_cache.move_kv_cache(slots, slots)


def full_mask(mask: Tensor, lengths: Tensor, numbers: int) -> Tensor:
    """Trees' masks (B, n, n) as SGLang's attention reads them: for each node its request's whole text, then the tree.

    One flat tensor, request after request, each with n rows of length + n, and further numbers up to `numbers`.

    >>> full_mask(torch.tensor([[[True, False], [True, True]]]), torch.tensor([1]), 7).int().tolist()
    [1, 1, 0, 1, 1, 1, 1]
    """
    n = mask.shape[1]
    flat = torch.ones(numbers, dtype=torch.bool, device=mask.device)
    width = lengths.long() + n
    area = n * width
    start = area.cumsum(0) - area + lengths  # of each request's first node, after the text
    node = torch.arange(n, device=mask.device)
    at = start[:, None, None] + node[:, None] * width[:, None, None] + node
    return flat.scatter_(0, at.flatten(), mask.flatten())
