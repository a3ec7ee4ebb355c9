"""When two texts differ: was it a tie that rounding decided?

Logits of one position differ in the last bits between passes of different shape. Where the two best
scores are closer than that, either choice is the target's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.noise import SEEDED, as_int64, gumbel
from redrafter.core.sampling import Sampling, penalise, restrict
from redrafter.core.tree import root_tree
from redrafter.runtime.row import Request
from redrafter.targets import Target


def tie(dtype: torch.dtype) -> float:
    """Scores closer than this are a numerical tie: bf16 logits near 20 are an eighth apart."""
    return {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.03}.get(dtype, 0.25)


@dataclass(frozen=True)
class Difference:
    """Where two texts part, and by how much the target preferred one token to the other."""

    index: int
    gap: float
    allowed: float

    @property
    def is_tie(self) -> bool:
        return self.gap < self.allowed


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs (or is missing in one), None if equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@torch.no_grad()
def explain(target: Target, request: Request, plain: Sequence[int], other: Sequence[int]) -> Difference | None:
    """None if equal. The gap is that of the two scores, or the distance of a cut token to the filter's edge.

    The edge of top-k and min-p is a score; that of top-p is a probability mass.
    """
    index = first_difference(plain, other)
    if index is None:
        return None
    allowed = tie(target.precision)
    if index >= min(len(plain), len(other)):
        return Difference(index, float("inf"), allowed)  # one text goes on where the other ended: never a tie
    whole = torch.tensor([[*request.prompt, *plain[:index]]], device=target.device)
    position = whole.shape[1]
    logits, _ = target.prefill(whole, [position], KVCache(slots=position), ())
    sampling = Sampling.of([request.sampling], target.vocab_size, target.device)
    counts = torch.bincount(whole[0], minlength=target.vocab_size)[None].float()
    raw = penalise(logits[:, None].float(), sampling, counts, root_tree(whole[:, -1]))
    kept = restrict(raw, sampling)[0, 0]
    scaled = restrict(raw, replace(sampling, sorts=False, floors=False))[0, 0]
    pair = [plain[index], other[index]]
    cut = [_to_edge(scaled, kept, token, request.sampling.top_p) for token in pair if kept[token] == -torch.inf]
    if cut:
        return Difference(index, max(cut), allowed)
    if request.sampling.temperature > 0:
        seeds = torch.tensor([as_int64(request.seed)], device=target.device)
        where = torch.tensor([[position]], device=target.device)
        kept = kept + gumbel(seeds, where, target.vocab_size, stream=SEEDED, dtype=kept.dtype)[0, 0]
    return Difference(index, float((kept[pair[0]] - kept[pair[1]]).abs()), allowed)


def _to_edge(scaled: Tensor, kept: Tensor, token: int, top_p: float) -> float:
    """How far a cut token is from having been kept, (V,) scores before and after the filters."""
    by_score = float(kept[kept > -torch.inf].min() - scaled[token])
    above = scaled.softmax(-1)[scaled > scaled[token]].sum()
    return min(by_score, abs(float(above) - top_p)) if top_p < 1 else by_score
