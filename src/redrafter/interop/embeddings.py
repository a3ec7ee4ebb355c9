"""The embeddings of a model whose vocabulary another engine splits among ranks."""

from collections.abc import Callable

from torch import Tensor, nn

from redrafter.errors import UnsupportedTarget


def split_embeddings(
    model: nn.Module,
    name: str,
    kind: type[nn.Module],
    head_kind: type[nn.Module],
    gather: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Input and output embedding (V, H); the same tensor twice where the model ties them.

    `kind` is the engine's class of split embeddings, `head_kind` its subclass for the output; `gather` puts the ranks'
    rows together, None on a single rank.
    """
    split = [m for m in model.modules() if isinstance(m, kind)]
    heads = [m for m in split if isinstance(m, head_kind)]
    inputs = [m for m in split if not isinstance(m, head_kind)]
    found = [next(iter(inputs), None), next(iter(heads or inputs), None)]
    whole: dict[int, Tensor] = {}
    for module in found:
        weight = getattr(module, "weight", None)
        if module is None or not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise UnsupportedTarget(
                f"{name} has no embeddings that a drafter could read (quantised or on another stage)"
            )
        if id(weight) not in whole:
            rows = weight.detach()
            if gather is not None:
                rows = gather(rows.contiguous())
            whole[id(weight)] = rows[: int(module.org_vocab_size)]  # type: ignore[arg-type]
    first, second = (whole[id(m.weight)] for m in found if m is not None)
    return first, second
