"""What a network in training does on held-out texts: simulated tokens/step, accuracy and loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from redrafter.config import Shape
from redrafter.drafters import registry
from redrafter.drafters.base import DrafterNet
from redrafter.drafters.load import bind
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.batches import make_batch, micro_batches
from redrafter.train.hidden_states import StateSource
from redrafter.train.objective import Objective, Score, add_scores
from redrafter.tuning.simulate import SimulatedSteps, simulate_batches, text_batches

CALIBRATION_TEXTS = 64
"""Training texts that `DrafterKind.calibrate` sees before each evaluation."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a network; it and its objective stay the caller's."""

    net: DrafterNet
    objective: Objective
    target: Target
    texts: Texts
    learn: Tensor
    """Texts that are learned from."""
    shape: Shape
    source: StateSource

    @torch.no_grad()
    def __call__(
        self, held: Tensor, micro: int, pause: Callable[[], None] = lambda: None
    ) -> tuple[SimulatedSteps, Score]:
        """On these texts, `micro` positions at once. What `pause` raises between two simulated steps ends it."""
        self.net.eval()
        try:
            self._calibrate()
            drafter = bind(self.net, self.target)
            batches = text_batches(self.target, drafter.layers, self.texts.select(held))
            walked = simulate_batches(batches, drafter, self.shape, pause)
            scores = []
            for part in micro_batches(self.texts, held.tolist(), micro):
                batch = make_batch(self.texts, part).to(self.target.device)
                scores.append(self.objective(batch, self.source.fetch(batch, part))[1])
        finally:
            self.net.train()
        return walked, add_scores(scores)

    def _calibrate(self) -> None:
        """Let the kind measure on training texts what no gradient trains, if it has something to measure."""
        calibrate = registry.get(self.net.config.kind).calibrate
        if calibrate is None:
            return
        rows = self.learn[:: max(1, len(self.learn) // CALIBRATION_TEXTS)][:CALIBRATION_TEXTS].tolist()
        batches = (
            make_batch(self.texts, part).to(self.target.device) for part in micro_batches(self.texts, rows, 4096)
        )
        calibrate(self.net, self.target, batches)
