"""Acceptance rules, one file each. A rule pairs a way to draft with the way to accept that is sound for it.

To add a rule: write its file, then name it in `redrafter.config.RULES`. See docs/extending.md.
"""

from importlib import import_module

import torch

from redrafter.config import RULES, RuleConfig, Shape
from redrafter.core.rules.beam_search import BeamSearch
from redrafter.core.rules.protocols import Rule, Search
from redrafter.core.rules.rejection import RejectionRule
from redrafter.core.rules.sampled_tree import SampledSearch

__all__ = ["BeamSearch", "RejectionRule", "Rule", "SampledSearch", "Search", "make_rule"]


def make_rule(config: RuleConfig, shape: Shape, vocab_size: int, dtype: torch.dtype) -> Rule:
    """The rule that `config` names. `dtype` is the target's; noise is fp32, or fp64 for a target in fp64."""
    noise_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    module, _, name = RULES[config.name].make.partition(":")
    rule: Rule = getattr(import_module(module), name)(config, shape, vocab_size, noise_dtype)
    return rule
