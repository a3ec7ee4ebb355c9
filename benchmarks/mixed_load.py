"""Requests with mixed parameters, and a choice of shapes that tries them all: load for tests of equality."""

from typing import Any

from redrafter.config import Shape
from redrafter.tuning.chooser import ShapeChooser

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.7, "logit_bias": {198: -5.0}},
    {"stop": ["\n\n", " the"]},
]
SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers briefly and to the point."}


class EveryShape(ShapeChooser):
    """Chooses the shapes in turn by the number of rows: this script tests equality, not speed."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__(None)
        self.all: list[Shape | None] = [*shapes, None]

    def choose(self, rows: int) -> Shape | None:
        return self.all[rows % len(self.all)]

    def shapes(self, rows: int) -> list[Shape | None]:
        return [self.choose(rows)]
