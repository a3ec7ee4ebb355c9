"""A memory over the accepted text: linear attention with decay. Its size is constant; it needs no KV cache.

Each accepted token adds a key k and a value v, both computed from its pair: the hidden state that chose the token, and
the token's embedding. A head's memory is the matrix M_t = Σ_j γ^(t−j) k_j v_jᵀ over the pairs up to t. The drafter's
state s reads q(s)ᵀ M_t. One more token is M ← γ M + k vᵀ; a prompt is one weighted sum. In training all positions read
at once: q_tᵀ M_t = Σ_{j ≤ t} γ^(t−j) (q_t · k_j) v_j is attention without a softmax.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.kernels.drafter_layers import narrow, read


class Memory(nn.Module):
    """`heads` matrices of size×size. Each has its own decay γ, with half-lives from 8 to 512 tokens at first."""

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
        """The memory before any token: (B, heads, size, size), at least fp32, since it is a sum over a whole text."""
        weight = self.key.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.zeros(batch, self.heads, self.size, self.size, dtype=dtype, device=weight.device)

    def add(self, memory: Tensor, pair: Tensor, count: Tensor) -> Tensor:
        """Add the first `count` (B,) of the pairs (B, n, pair) to the memory."""
        key, value = self.pairs(pair)
        age = count[:, None] - 1 - torch.arange(pair.shape[1], device=pair.device)  # (B, n), < 0: not accepted
        weight = torch.where(age[..., None] >= 0, self._power(age.clamp(min=0), memory.dtype), 0.0)  # (B, n, heads)
        key, value = key.to(memory.dtype) * weight[..., None], value.to(memory.dtype)
        if torch.compiler.is_compiling():  # a step has few pairs: the compiler fuses this form into one kernel
            new = (key[..., None] * value[..., None, :]).sum(1)
        else:
            new = torch.einsum("bnhk,bnhv->bhkv", key, value)
        return memory * self._power(count, memory.dtype)[..., None, None] + new

    def read(self, memory: Tensor, state: Tensor) -> Tensor:
        """Read each row's memory with the states (B, w, state) -> (B, w, heads · size)."""
        if narrow(state) and memory.dtype == torch.float32:
            found: Tensor = read(self.query(state), memory)
            return found
        found = torch.einsum("bwhk,bhkv->bwhv", self.queries(state).to(memory.dtype), memory)
        return bounded(found).flatten(2).to(state.dtype)

    def weights(self, first: Tensor, count: int, length: int, own: bool) -> Tensor:
        """(B, heads, P, S) the weight of pair j at position t: γ^(t−j) for j ≤ t, 0 for later pairs.

        A row has P = `count` positions from `first` (B,) on and S = `length` pairs. With `own`, the weight of a
        position's own pair (j = t) is 0 too: `read_all` then adds it separately.
        """
        device = self.decay.device
        at = first[:, None] + torch.arange(count, device=device)  # (B, P)
        age = (at[..., None] - torch.arange(length, device=device))[:, None]  # (B, 1, P, S)
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
        """Each position t reads the pairs up to t -> (B, P, T, heads · size).

        Keys and values are (B, heads, S, size), queries (B, heads, T, P, size): T queries at each position. If the
        token after a position differs from the text's, `own` holds that position's own keys and values (B, heads, P,
        size) instead.
        """
        batch, heads, depth, count, _ = query.shape
        match = torch.matmul(query.flatten(2, 3), key.transpose(2, 3)).view(batch, heads, depth, count, -1)
        match = match * weights.to(query.dtype)[:, :, None]
        found = torch.matmul(match.flatten(2, 3), value).view_as(query)
        if own is not None:
            found = found + (query * own[0][:, :, None]).sum(-1, keepdim=True) * own[1][:, :, None]
        return bounded(found).permute(0, 3, 2, 1, 4).flatten(3)

    def _power(self, exponent: Tensor, dtype: torch.dtype) -> Tensor:
        """Exponents (...) -> γ to that power (..., heads)."""
        return (F.logsigmoid(self.decay.to(dtype)) * exponent[..., None].to(dtype)).exp()

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.size)

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(self._split(x), dim=-1).to(x.dtype)  # autocast would keep fp32


def bounded(reading: Tensor) -> Tensor:
    """Limit a reading to about unit size; a small reading stays nearly as it is. A long text would make it large.

    >>> bounded(torch.tensor([[0.5, 0.0], [3000.0, 4000.0]])).mul(100).round().tolist()
    [[47.0, 0.0], [85.0, 113.0]]
    """
    return reading * (reading.square().mean(-1, keepdim=True) + 1).rsqrt()
