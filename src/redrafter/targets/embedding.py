"""Rows of an input or output embedding, whether its weights are a tensor or packed."""

from typing import Any

from torch import Tensor


def embedding_shape(embedding: Any) -> tuple[int, int]:
    """Tokens and width."""
    shape = embedding.shape if hasattr(embedding, "rows") else embedding.weight.shape
    return int(shape[0]), int(shape[1])


def embedding_rows(embedding: Any, ids: Tensor | None = None) -> Tensor:
    """The rows of these tokens (n,), or all of them -> (n, width)."""
    if ids is not None and hasattr(embedding, "rows"):
        rows: Tensor = embedding.rows(ids)
        return rows
    weight: Tensor = embedding.weight.detach()
    return weight if ids is None else weight[ids.to(weight.device)]
