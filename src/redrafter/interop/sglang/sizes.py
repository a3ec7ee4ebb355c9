"""SGLang's verification for several sizes of tree: an attention backend and recorded passes for each size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LEAST_QUERIES = 16
"""Rows of the smallest matrix product in Triton."""
FEW_WARPS = 4


class SizedRunners:
    """SGLang itself prepares the largest size. The others are prepared here, as its adaptive EAGLE worker does it."""

    def __init__(self, runner: Any, server_args: Any, widths: Sequence[int], most_tokens: int) -> None:
        self.runner = runner
        self.states = [(runner.attn_backend, runner.decode_cuda_graph_runner)]
        for width in widths[1:]:
            batches = [b for b in self.batch_sizes() if b * width <= most_tokens]
            with _as_if(runner, server_args, width, batches), _tiles(width):
                self.states.append(self._made(server_args, width, bool(batches)))

    def _made(self, server_args: Any, width: int, record: bool) -> tuple[Any, Any]:
        backend = self.runner._get_attention_backend(init_new_workspace=True)
        if not record:
            return backend, None
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

        recorded = DecodeCudaGraphRunner(
            self.runner,
            attn_backend=backend,
            speculative_num_steps=server_args.speculative_num_steps,
            speculative_num_draft_tokens=width,
        )
        return backend, recorded

    def batch_sizes(self) -> list[int]:
        """The batch sizes that SGLang recorded; empty if it records none."""
        recorded = self.states[0][1]
        return [] if recorded is None else list(recorded.capture_bs)

    def most_rows(self) -> list[int | None]:
        """For each size of tree, the largest batch that runs as a recorded pass; no limit if nothing is recorded."""
        if self.states[0][1] is None:
            return [None for _ in self.states]
        # The smallest tree must take any batch: SGLang then runs it eagerly.
        rows = [0 if recorded is None else int(recorded.max_bs) for _, recorded in self.states]
        return [*rows[:-1], None]

    def use(self, size: int) -> None:
        """The next pass verifies trees of this size."""
        self.runner.attn_backend, self.runner.decode_cuda_graph_runner = self.states[size]


@contextmanager
def _tiles(width: int) -> Iterator[None]:
    """While passes are recorded: attention computes as many queries at a time as a tree has nodes.

    SGLang's kernel for several queries of a request takes 128 at a time on Hopper. For trees of 8 nodes, 15 of 16
    products would be of padding.
    """
    from sglang.kernels.ops.attention import extend_attention

    chosen = extend_attention._get_block_sizes_for_extend_attention

    def narrow(*head_sizes: int) -> tuple[int, ...]:
        *dims, queries, keys, warps = chosen(*head_sizes)
        fewer = min(queries, max(LEAST_QUERIES, 1 << (width - 1).bit_length()))
        return (*dims, fewer, keys, warps if fewer == queries else min(warps, FEW_WARPS))

    extend_attention._get_block_sizes_for_extend_attention = narrow
    try:
        yield
    finally:
        extend_attention._get_block_sizes_for_extend_attention = chosen


@contextmanager
def _as_if(runner: Any, server_args: Any, width: int, batches: list[int]) -> Iterator[None]:
    """While a backend is made: as if SGLang had been started with this size of tree and these batch sizes."""
    before, workspace = server_args.speculative_num_draft_tokens, getattr(runner, "init_new_workspace", None)
    decode = server_args.cuda_graph_config.decode
    sizes = decode.bs
    server_args.override("redrafter", speculative_num_draft_tokens=width)
    decode.bs = batches or sizes
    try:
        yield
    finally:
        server_args.override("redrafter", speculative_num_draft_tokens=before)
        decode.bs, runner.init_new_workspace = sizes, workspace
