"""A memory over the accepted text: constant size, no KV cache, recomputed from verified hidden states.

Each accepted token leaves a pair behind: a key and a value, both made of (the hidden state that chose it,
its embedding). A head's memory is the matrix M_t = Σ_j γ^(t−j) k_j v_jᵀ over the pairs up to t; a drafter's
state s reads q(s)ᵀ M_t. One token more is M ← γ M + k vᵀ; a prompt is one weighted sum; and in training all
positions read at once, since q_tᵀ M_t = Σ_{j ≤ t} γ^(t−j) (q_t · k_j) v_j is attention without a softmax.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.kernels.drafter_layers import narrow, read


class Memory(nn.Module):
    """`heads` matrices of size×size, with a decay γ each, from one that forgets at once to one that hardly does."""

    def __init__(self, heads: int, size: int, pair_size: int, state_size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.key = nn.Linear(pair_size, heads * size, bias=False)
        self.value = nn.Linear(pair_size, heads * size, bias=False)
        self.query = nn.Linear(state_size, heads * size, bias=False)
        half_lives = torch.logspace(3, 9, heads, base=2)  # 8 to 512 tokens
        self.decay = nn.Parameter(torch.logit(0.5 ** (1 / half_lives)))

    @property
    def out_size(self) -> int:
        return self.heads * self.size

    def pairs(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        """(..., pair) -> keys of length 1 and values, each (..., heads, size)."""
        return self._unit(self.key(pair)), self._split(self.value(pair))

    def queries(self, state: Tensor) -> Tensor:
        return self._unit(self.query(state))

    def empty(self, batch: int) -> Tensor:
        """Nothing read yet: (B, heads, size, size), fp32 or better, since it sums up a whole text."""
        weight = self.key.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.zeros(batch, self.heads, self.size, self.size, dtype=dtype, device=weight.device)

    def add(self, memory: Tensor, pair: Tensor, count: Tensor) -> Tensor:
        """The memory after the first `count` (B,) of the pairs (B, n, pair), all in one sum."""
        key, value = self.pairs(pair)
        age = count[:, None] - 1 - torch.arange(pair.shape[1], device=pair.device)  # (B, n), < 0: not accepted
        weight = torch.where(age[..., None] >= 0, self._power(age.clamp(min=0), memory.dtype), 0.0)  # (B, n, heads)
        key, value = key.to(memory.dtype) * weight[..., None], value.to(memory.dtype)
        if torch.compiler.is_compiling():  # a step's few pairs: one kernel, with all that is around it
            new = (key[..., None] * value[..., None, :]).sum(1)
        else:
            new = torch.einsum("bnhk,bnhv->bhkv", key, value)
        return memory * self._power(count, memory.dtype)[..., None, None] + new

    def read(self, memory: Tensor, state: Tensor) -> Tensor:
        """States (B, w, state) read their row's memory -> (B, w, heads · size)."""
        if narrow(state) and memory.dtype == torch.float32:
            found: Tensor = read(self.query(state), memory)
            return found
        found = torch.einsum("bwhk,bhkv->bwhv", self.queries(state).to(memory.dtype), memory)
        return bounded(found).flatten(2).to(state.dtype)

    def weights(self, length: int, own: bool) -> Tensor:
        """(heads, S, S) how much position t still has of the pair j: γ^(t−j), nothing of later ones.

        With `own` the position's own pair is left to it, to be read apart.
        """
        place = torch.arange(length, device=self.decay.device)
        age = place[:, None] - place
        weight = (F.logsigmoid(self.decay)[:, None, None] * age.clamp(min=0)).exp()
        return torch.where(age > 0 if own else age >= 0, weight, 0.0)

    def read_all(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: Tensor,
        own: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Position t of every row reads the pairs up to t, as if it were the last; -> (B, S, T, heads · size).

        Keys and values are (B, heads, S, size), queries (B, heads, T, S, size): T of them at each position. A
        position that guesses after a token which is not the text's has a pair of its `own` in the text's place.
        """
        batch, heads, depth, length, _ = query.shape
        match = torch.matmul(query.flatten(2, 3), key.transpose(2, 3)).view(batch, heads, depth, length, length)
        match = match * weights.to(query.dtype)[:, None]
        found = torch.matmul(match.flatten(2, 3), value).view_as(query)
        if own is not None:
            found = found + (query * own[0][:, :, None]).sum(-1, keepdim=True) * own[1][:, :, None]
        return bounded(found).permute(0, 3, 2, 1, 4).flatten(3)

    def _power(self, exponent: Tensor, dtype: torch.dtype) -> Tensor:
        """(...) ages -> (..., heads) γ to that power."""
        return (F.logsigmoid(self.decay.to(dtype)) * exponent[..., None].to(dtype)).exp()

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.size)

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(self._split(x), dim=-1).to(x.dtype)  # autocast would keep fp32


def bounded(reading: Tensor) -> Tensor:
    """A faint reading as it is, a loud one at unit size: a long text must not shout.

    >>> bounded(torch.tensor([[0.5, 0.0], [3000.0, 4000.0]])).mul(100).round().tolist()
    [[47.0, 0.0], [85.0, 113.0]]
    """
    return reading * (reading.square().mean(-1, keepdim=True) + 1).rsqrt()
