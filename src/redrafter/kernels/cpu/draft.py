"""A recurrent drafter's weights for the compiled beam search, and the search on tensors."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from redrafter.kernels.cpu.library import FLOAT, LONG, POINTER, Matrix, fields, require_done
from redrafter.kernels.cpu.packed import PackedMatrix
from redrafter.kernels.threads import thread_count

MATRICES = (
    *("cell_u", "cell_w", "from_context", "query", "key", "value"),
    *("input_state", "input_context", "input_memory", "head", "vocabulary", "embedding"),
)
BIASES = ("cell_bias", "context_bias", "input_bias")


class _Network(ctypes.Structure):
    """As in draft.h."""

    _fields_: ClassVar[list[Any]] = [
        *fields(Matrix, *MATRICES),
        ("blocks", POINTER),
        *fields(POINTER, *BIASES, "block_biases", "log_decay", "vocabulary_rows", "token_ids"),
        *fields(LONG, "state", "exit", "context", "width", "heads", "size", "block_count", "guesses"),
        ("embedding_scale", FLOAT),
    ]


class _Draft(ctypes.Structure):
    """As in draft.h."""

    _fields_: ClassVar[list[Any]] = [
        *fields(POINTER, "context", "memory", "last", "temperature", "noise", "chain", "odds"),
        *fields(LONG, "noise_row", "noise_step", "rows", "beams", "length", "chain_length", "threads"),
        *fields(POINTER, "tokens", "parents", "scores", "follows", "found"),
        ("until", FLOAT),
    ]


class _Taken(ctypes.Structure):
    """As in draft.h."""

    _fields_: ClassVar[list[Any]] = [
        *fields(POINTER, "hidden", "ids", "count", "context", "memory"),
        *fields(LONG, "rows", "tokens", "layers", "threads"),
    ]


class DraftModel:
    """A recurrent drafter that one C++ call runs."""

    def __init__(
        self,
        matrices: Mapping[str, PackedMatrix],
        blocks: Sequence[PackedMatrix],
        biases: Mapping[str, Tensor],
        block_biases: Sequence[Tensor],
        vocabulary: Tensor,
        token_ids: Tensor | None,
        embedding_scale: float,
        log_decay: Tensor | None,
        layers: int,
    ) -> None:
        """Names as in MATRICES and BIASES. log_decay: (heads,) of the memory; None without one, and its matrices too.

        vocabulary: (guesses, width) in fp32, of which the matrix of that name is a rounded copy.
        layers: hidden states of the target that a context is made of.
        """
        memory_heads = 0 if log_decay is None else len(log_decay)
        log_decay = None if log_decay is None else log_decay.detach().float().contiguous()
        self.layers = layers
        guesses, known = matrices["vocabulary"].shape[0], matrices["embedding"].shape[0]
        if token_ids is not None:
            token_ids = token_ids.long().contiguous()
            inside = len(token_ids) == guesses and bool(((token_ids >= 0) & (token_ids < known)).all())
        else:
            inside = guesses <= known
        require_done(inside, known)
        kept_biases = [b.detach().contiguous() for b in block_biases]
        named = {name: b.detach().contiguous() for name, b in biases.items()}
        block_matrices = (Matrix * len(blocks))(*(b.fields for b in blocks))
        pointers = (ctypes.c_void_p * len(blocks))(*(b.data_ptr() for b in kept_biases))
        vocabulary = vocabulary.detach().float().contiguous()
        self._kept = (vocabulary, matrices, blocks, kept_biases, named, block_matrices, pointers, token_ids, log_decay)
        self.lib = matrices["cell_u"].lib
        self.network = _Network(
            **{name: matrix.fields for name, matrix in matrices.items()},
            **{name: bias.data_ptr() for name, bias in named.items()},
            blocks=ctypes.addressof(block_matrices),
            block_biases=ctypes.addressof(pointers),
            log_decay=None if log_decay is None else log_decay.data_ptr(),
            vocabulary_rows=vocabulary.data_ptr(),
            token_ids=None if token_ids is None else token_ids.data_ptr(),
            state=matrices["cell_u"].shape[1],
            exit=matrices["input_state"].shape[0],
            context=matrices["from_context"].shape[1],
            width=matrices["cell_w"].shape[1],
            heads=memory_heads,
            size=matrices["query"].shape[0] // memory_heads if memory_heads else 0,
            block_count=len(blocks),
            guesses=matrices["vocabulary"].shape[0],
            embedding_scale=embedding_scale,
        )

    def search(
        self,
        context: Tensor,
        memory: Tensor | None,
        last: Tensor,
        *,
        width: int,
        length: int,
        temperature: Tensor,
        noise: Tensor | None,
        chain: tuple[Tensor, Tensor] | None = None,
        until: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Contexts (B, C), memories, last tokens (B,), noise (B, L or more, V) -> tokens, parents, scores (B, L, W).

        A chain, tokens and odds (B, D), is mixed in. With a chain at least as long as the search, the last result tells
        which paths (B, W) have followed it. The search ends before `length` where every row's best path is less
        probable than `until`.
        """
        rows = last.shape[0]
        context, last = context.contiguous(), last.contiguous()
        memory = None if memory is None else memory.contiguous()
        temperature = temperature.float().contiguous()
        tokens, parents = (torch.empty(rows, length, width, dtype=torch.long) for _ in range(2))
        scores, follows = torch.empty(rows, length, width), torch.empty(rows, dtype=torch.long)
        if noise is not None and (noise.shape[1] < length or noise.shape[2] < self.network.embedding.rows):
            raise IndexError(f"noise of the shape {tuple(noise.shape)} for {length} guesses")
        found = ctypes.c_long(length)
        ids, odds = (None, None) if chain is None else (chain[0].contiguous(), chain[1].float().contiguous())
        call = _Draft(
            context=context.data_ptr(),
            memory=None if memory is None else memory.data_ptr(),
            last=last.data_ptr(),
            temperature=temperature.data_ptr(),
            noise=None if noise is None else noise.data_ptr(),
            chain=None if ids is None else ids.data_ptr(),
            odds=None if odds is None else odds.data_ptr(),
            chain_length=0 if ids is None else ids.shape[1],
            noise_row=0 if noise is None else noise.stride(0),
            noise_step=0 if noise is None else noise.stride(1),
            rows=rows,
            beams=width,
            length=length,
            threads=thread_count(),
            tokens=tokens.data_ptr(),
            parents=parents.data_ptr(),
            scores=scores.data_ptr(),
            follows=follows.data_ptr(),
            found=ctypes.addressof(found),
            until=until,
        )
        require_done(self.lib.run_draft(ctypes.byref(self.network), ctypes.byref(call)), self.network.embedding.rows)
        if found.value < length:  # what would follow is too unlikely, the rest of a chain too
            tokens, parents, scores = (x.narrow(1, 0, found.value) for x in (tokens, parents, scores))
            return tokens, parents, scores, None
        if ids is None or ids.shape[1] < length:
            return tokens, parents, scores, None
        return tokens, parents, scores, follows[:, None] == torch.arange(width)

    def take(self, hidden: Tensor, tokens: Tensor, count: Tensor, context: Tensor, memory: Tensor | None) -> None:
        """Take in the first `count` (B,) of the tokens (B, n), chosen by hidden states (B, n, C).

        The contexts (B, C) and memories, which must be contiguous, become the new ones.
        """
        rows, n = tokens.shape
        hidden, tokens, count = hidden.contiguous(), tokens.contiguous(), count.contiguous()
        assert context.is_contiguous()
        assert memory is None or memory.is_contiguous()
        call = _Taken(
            hidden=hidden.data_ptr(),
            ids=tokens.data_ptr(),
            count=count.data_ptr(),
            context=context.data_ptr(),
            memory=None if memory is None else memory.data_ptr(),
            rows=rows,
            tokens=n,
            layers=self.layers,
            threads=thread_count(),
        )
        require_done(self.lib.run_take(ctypes.byref(self.network), ctypes.byref(call)), self.network.embedding.rows)
