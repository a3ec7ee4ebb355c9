"""Acceptance rules, one file each. A rule pairs a way to draft with the way to accept that is sound for it.

To add a rule: write its file, then name it here and in `redrafter.config.RULES`. See docs/extending.md.
"""

from collections.abc import Callable

import torch

from redrafter.config import RuleConfig, Shape
from redrafter.core.rules.beam_search import BeamSearch
from redrafter.core.rules.protocols import Rule, Search
from redrafter.core.rules.rejection import RejectionRule
from redrafter.core.rules.sampled_tree import SampledSearch
from redrafter.core.rules.seeded import SeededRule
from redrafter.core.rules.typical import TypicalRule

__all__ = ["RULES", "BeamSearch", "RejectionRule", "Rule", "SampledSearch", "Search", "make_rule"]

RULES: dict[str, Callable[[RuleConfig, Shape, int, torch.dtype], Rule]] = {
    "seeded": SeededRule,
    "rejection": lambda config, shape, vocab_size, _: RejectionRule(config, shape, vocab_size),
    "typical": TypicalRule,
}
"""(configuration, shape, vocabulary size, dtype of the noise) -> rule."""


def make_rule(config: RuleConfig, shape: Shape, vocab_size: int, dtype: torch.dtype) -> Rule:
    """The rule that `config` names. `dtype` is the target's; noise is fp32, or fp64 for a target in fp64."""
    noise_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return RULES[config.name](config, shape, vocab_size, noise_dtype)
