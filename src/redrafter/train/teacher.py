"""The target as teacher: its distribution over the tokens the drafter can guess, from its last hidden state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.targets import Target

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}


class Teacher:
    """The target's head, restricted to `token_ids` (V',), applied a chunk of positions at a time."""

    def __init__(self, target: Target, token_ids: Tensor | None) -> None:
        self.target = target
        head = target.output_embedding
        bias = getattr(head, "bias", None)
        every = slice(None) if token_ids is None else token_ids
        self.weight = head.weight.detach().to(target.device)[every]
        self.bias = None if bias is None else bias.detach().to(target.device)[every]
        config = target.config
        # What a few families do to logits behind the head; `check` sees whether that was all.
        self.scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states (n, H) -> (n, V')."""
        logits = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias) * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def probabilities(self, hidden: Tensor) -> Tensor:
        """(n, V'), in the target's dtype."""
        logits = self.logits(hidden)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return torch.softmax(logits, -1, dtype=exact).to(hidden.dtype)

    @torch.no_grad()
    def check(self, tokens: Tensor) -> None:
        """Raise unless the head alone gives the model's own logits after these tokens (B, S)."""
        own = self.target.model(input_ids=tokens, use_cache=False).logits.double()
        mine = Teacher(self.target, None).logits(self.target.states(tokens, (-1,))).double()
        gap = float((mine - own).norm() / own.norm())
        if not gap <= TOLERANCE.get(self.target.dtype, 0.05):
            raise UnsupportedTarget(
                f"{self.target.name} changes its logits after its head (difference {gap:.2g}), so soft labels cannot "
                "be computed in chunks: train with --loss hard"
            )
