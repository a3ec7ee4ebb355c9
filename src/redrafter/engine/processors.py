"""A user's LogitsProcessors of transformers, run for each tree node on the tokens of the node's path."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import shown
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
    if isinstance(processor, type) or not callable(processor):
        raise ConfigError(f"a logits processor is called with (ids, scores), not {shown(processor)}")
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
    first, _, again = (processor(draw[0].clone(), draw[1].clone()) for draw in (draws[0], draws[1], draws[0]))
    if not isinstance(first, Tensor) or first.shape != draws[0][1].shape:
        got = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise ConfigError(f"the logits processor {name} must return scores of shape (1, {vocab_size}), got {got}")
    if bool(first.isnan().any()):
        raise ConfigError(f"the logits processor {name} cannot be used: it returns NaN")
    if not torch.equal(first, again):
        raise ConfigError(
            f"the logits processor {name} cannot be used: it gives another result for the same (ids, scores) the "
            "second time, so it keeps a state"
        )


class DeadEnds:
    """Paths after which no token can be chosen, and why. A guess may lead to one that the text never reaches."""

    def __init__(self, ids: Callable[[], list[int]]) -> None:
        self.ids, self.prompt = ids, len(ids())
        self.begin()

    def begin(self) -> None:
        """Forget the paths of the step before."""
        self.known = len(self.ids())
        self.reasons: dict[tuple[int, ...], str] = {}

    def add(self, path: Sequence[int], reason: str) -> None:
        self.reasons.setdefault(tuple(path), reason)

    def check(self) -> None:
        """Raise ConfigError if the text has a token behind such a path."""
        tokens = self.ids()[self.known :] if self.reasons else []
        for count in range(len(tokens)):
            if reason := self.reasons.get(tuple(tokens[:count])):
                raise ConfigError(f"{reason} at token {self.known - self.prompt + count + 1} of the text")


class PathProcessors:
    """A `core.sampling.Processor` of one row. `ids` returns its prompt and all tokens decided so far."""

    def __init__(self, processors: Sequence[Any], ids: Callable[[], list[int]]) -> None:
        self.processors, self.ids, self.dead_ends = processors, ids, DeadEnds(ids)

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor:
        self.dead_ends.begin()
        result = logits.clone()
        mask, tokens, decided = tree.mask[0].cpu(), tree.tokens[0, 1:].cpu(), self.ids()
        paths = {node: tokens[mask[node, 1:]].tolist() for node in tree.valid[0].cpu().nonzero()[:, 0].tolist()}
        for node, path in paths.items():
            ids = torch.tensor([decided + path], device=logits.device)
            scores = logits[0, node][None]
            for processor in self.processors:
                scores = processor(ids, scores)
            result[0, node] = scores[0]
        for node in dead_nodes(result):
            if node in paths:
                self.dead_ends.add(paths[node], self._reason(decided + paths[node], logits[0, node][None]))
        return result

    def _reason(self, ids: list[int], scores: Tensor) -> str:
        """Why no token can be chosen after these ids: the first processor that leaves none."""
        if dead_nodes(scores[None]):
            return "the model returns NaN" if bool(scores.isnan().any()) else "logit_bias leaves no token to choose"
        for processor in self.processors:
            scores = processor(torch.tensor([ids], device=scores.device), scores)
            if dead_nodes(scores[None]):
                problem = "returns NaN" if bool(scores.isnan().any()) else "leaves no token to choose"
                return f"the logits processor {type(processor).__name__} {problem}"
        raise AssertionError("the processors leave a token now")


def dead_nodes(logits: Tensor) -> list[int]:
    """Nodes of a row's (1, N+1, V) logits at which no token can be chosen: all are -inf, or one is NaN.

    >>> dead_nodes(torch.tensor([[[0.0, -torch.inf], [-torch.inf, -torch.inf], [0.0, torch.nan]]]))
    [1, 2]
    """
    return [node for node, best in enumerate(logits[0].amax(-1).tolist()) if not best > -math.inf]
