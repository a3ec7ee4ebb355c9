"""Widened models: a small target and its drafters in the shape of a larger model, with the same outputs."""

from benchmarks.widen.drafter import parameters_per_draft_step, widen_recurrent
from benchmarks.widen.peers import parameters_read, widen_eagle, widen_medusa
from benchmarks.widen.target import SHAPES, LlamaShape, widen

__all__ = [
    "SHAPES",
    "LlamaShape",
    "parameters_per_draft_step",
    "parameters_read",
    "widen",
    "widen_eagle",
    "widen_medusa",
    "widen_recurrent",
]
