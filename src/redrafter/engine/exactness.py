"""What an engine promises about its text: always the tokens of plain decoding, or the same tokens except at ties."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from redrafter.config import RuleConfig
from redrafter.core.step import Drafter
from redrafter.drafters.traits import keeps_cache
from redrafter.engine.ties import tie
from redrafter.errors import NotExact
from redrafter.targets import Target

Exactness = Literal["bitwise", "ties"]
"""`bitwise`: a token's logits have the same bits in every pass, so the text equals that of plain decoding.
`ties`: the text equals that of plain decoding, except where two scores are closer than rounding."""

Exact = Literal["auto", "require"]
"""What a user asks for. `auto`: the engine finds out what it can promise. `require`: refuse anything but `bitwise`."""


@dataclass(frozen=True)
class Promise:
    """The exactness of an engine's texts."""

    exactness: Exactness | None
    """None: the acceptance rule makes no promise about tokens."""
    reason: str = ""
    """Why the exactness is not `bitwise`; empty if it is."""
    required: bool = False
    """Whether anything but `bitwise` is refused."""

    def check(self) -> None:
        """Raise NotExact if `bitwise` is required and cannot be promised."""
        if self.required and self.exactness != "bitwise":
            raise NotExact(
                f"exactness bitwise is required, but {self.reason}; leave out exact=require (--exact require)"
            )

    def sentence(self, dtype: torch.dtype) -> str:
        """For people."""
        if self.exactness == "bitwise":
            return "bitwise: text equals plain decoding token for token; logits have the same bits in every pass"
        if self.exactness == "ties":
            gap = f"scores less than {tie(dtype):g} apart"
            return f"ties: text equals plain decoding token for token, except at ties ({gap}), because {self.reason}"
        return f"no promise about tokens: {self.reason}"


def weakest(promised: Iterable[Exactness | None]) -> Exactness | None:
    """What holds for all of several texts.

    >>> weakest(["bitwise", "ties"])
    'ties'
    """
    return max(promised, key=("bitwise", "ties", None).index)


def make_promise(
    target: Target,
    drafter: Drafter,
    rule: RuleConfig,
    *,
    recorded: bool,
    compiles: bool,
    required: bool = False,
) -> Promise:
    """What an engine can promise. The first call for a model on a GPU tries its passes."""
    if not rule.lossless:
        return Promise(None, f"the rule {rule.name} is lossy", required)
    if rule.name != "seeded":
        return Promise(None, f"the rule {rule.name} keeps the distribution of the text, not its tokens", required)
    reason = why_ties(target, drafter, recorded=recorded, compiles=compiles)
    return Promise("ties" if reason else "bitwise", reason, required)


def unrecorded(device: torch.device) -> str:
    """Why texts of steps that are not recorded may differ at ties."""
    where = "on a CPU" if device.type == "cpu" else "in the eager runtime"
    return f"{where} the last bits of logits depend on the number of tokens in a pass"


def why_ties(target: Target, drafter: Drafter, *, recorded: bool, compiles: bool) -> str:
    """Why the text may differ at ties; empty if it cannot differ."""
    if target.same_bits:
        return ""
    if target.recurrent:
        return "layers with a recurrent state read a prompt in other products than they write a text"
    if not recorded:
        return unrecorded(target.device)
    if keeps_cache(drafter):
        return "steps with a causal LM or an MTP module as drafter are not recorded"
    from redrafter.targets.cuda.verifier import has_same_bits, verifier  # imports much of transformers

    found = verifier(target, compiles)
    if has_same_bits(found):
        return ""
    if found.flat is None:
        return f"the tree attention kernel does not run {target.name}"
    dtype = str(target.dtype).removeprefix("torch.")
    return f"the passes of {target.name} in {dtype} give a token different bits (checked by trying)"
