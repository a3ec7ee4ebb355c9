"""Earlier occurrences of a text's end, in plain torch: the oracle."""

import torch
import torch.nn.functional as F
from torch import Tensor


def matches(tokens: Tensor, lengths: Tensor, longest: int, shortest: int, count: int) -> tuple[Tensor, Tensor]:
    """Texts (B, S) and their lengths (B,) -> the `count` places that the text's end occurred before, and their sizes.

    Longer matches come first, then later ones. A place is that of the token after the match; a size of 0: no match.

    >>> [x.tolist() for x in matches(torch.tensor([[1, 2, 3, 1, 2, 0]]), torch.tensor([5]), 4, 2, 2)]
    [[[2, 0]], [[2, 0]]]
    """
    slots = tokens.shape[1]
    place = torch.arange(slots, device=tokens.device)
    back = torch.arange(longest, 0, -1, device=place.device)
    at_end = tokens.gather(1, (lengths[:, None] - back).clamp(min=0))  # (B, longest)
    before = F.pad(tokens, (longest, -1), value=-1).unfold(1, longest, 1)  # (B, S, longest) the tokens before each
    same = (before == at_end[:, None]).flip(2)
    run = same.long().cumprod(2).sum(2)  # run[b, e]: tokens before e that equal the text's end
    usable = (run >= shortest) & (place < lengths[:, None])
    rank = torch.where(usable, run * slots + place, -1)
    best, _ = rank.max(1, keepdim=True) if count == 1 else rank.topk(min(count, slots), dim=1)
    size = torch.where(best >= 0, best // slots, 0)
    return torch.where(best >= 0, best % slots, 0), size


def continuations(tokens: Tensor, lengths: Tensor, starts: Tensor, length: int) -> Tensor:
    """(B, W, L) what followed; if the text ends before the guess does, repeat: the text is in a loop."""
    period = (lengths[:, None] - starts).clamp(min=1)[..., None]
    where = starts[..., None] + torch.arange(length, device=starts.device) % period
    return tokens.gather(1, where.flatten(1)).view_as(where)


def chain(tokens: Tensor, lengths: Tensor, longest: int, shortest: int, length: int) -> tuple[Tensor, Tensor]:
    """What followed (B, L) the longest, then most recent, match, and the match's size (B,)."""
    starts, sizes = matches(tokens, lengths, longest, shortest, 1)
    return continuations(tokens, lengths, starts, length)[:, 0], sizes[:, 0]
