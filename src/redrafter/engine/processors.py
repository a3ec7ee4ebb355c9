"""A user's LogitsProcessors of transformers, run for each tree node on the tokens of the node's path."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from redrafter.core.tree import Tree
from redrafter.errors import ConfigError

# Processors that pass the checks below and still depend on more than (ids, scores): another pass of a model, the
# row's index in the batch, or the number of calls.
UNUSABLE = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model a second time",
    "PrefixConstrainedLogitsProcessor": "depends on the row's index in the batch",
    "SynthIDTextWatermarkLogitsProcessor": "keeps a state from call to call",
    "HammingDiversityLogitsProcessor": "depends on other beams",
}


def check_processor(processor: Any, vocab_size: int, device: torch.device) -> None:
    """Refuse by name a processor that does more than map (ids, scores) to scores."""
    name = type(processor).__name__
    if name in UNUSABLE:
        raise ConfigError(f"the logits processor {name} cannot be used: it {UNUSABLE[name]}")
    parameters = list(inspect.signature(processor).parameters.values())
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if len(required) > 2:
        extra = ", ".join(p.name for p in required[2:])
        raise ConfigError(f"the logits processor {name} cannot be used: besides ids and scores it needs {extra}")
    generator = torch.Generator().manual_seed(0)
    draws = [
        (
            torch.randint(vocab_size, (1, 8), generator=generator).to(device),
            torch.randn(1, vocab_size, generator=generator).to(device),
        )
        for _ in range(2)
    ]
    first = processor(draws[0][0].clone(), draws[0][1].clone())
    processor(draws[1][0].clone(), draws[1][1].clone())
    again = processor(draws[0][0].clone(), draws[0][1].clone())
    if not torch.equal(first, again):
        raise ConfigError(
            f"the logits processor {name} cannot be used: it gives another result for the same (ids, scores) the "
            "second time, so it keeps a state"
        )


class PathProcessors:
    """A `core.sampling.Processor`. `ids` returns, for each row, the prompt and all tokens decided so far."""

    def __init__(self, processors: Sequence[Any], ids: Callable[[], list[list[int]]]) -> None:
        self.processors, self.ids = processors, ids

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor:
        result = logits.clone()
        mask, tokens, valid = tree.mask.cpu(), tree.tokens.cpu(), tree.valid.cpu()
        for row, decided in enumerate(self.ids()):
            for node in valid[row].nonzero()[:, 0].tolist():
                path = tokens[row, 1:][mask[row, node, 1:]].tolist()
                ids = torch.tensor([decided + path], device=logits.device)
                scores = logits[row, node][None]
                for processor in self.processors:
                    scores = processor(ids, scores)
                result[row, node] = scores[0]
        return result
