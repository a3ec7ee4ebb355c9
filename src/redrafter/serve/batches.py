"""The running batch of a server."""

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.engine import Engine
from redrafter.runtime.batch import Batch
from redrafter.serve.config import ServeConfig


def make_batch(engine: Engine, config: ServeConfig, shapes: list[Shape], drafter: Drafter | None = None) -> Batch:
    """`drafter`: another than the engine's."""
    on_gpu = engine.target.device.type == "cuda"
    context = config.context or (4096 if on_gpu else 2048)
    return Batch(
        engine.target,
        drafter or engine.drafter,
        rows=config.rows or (32 if on_gpu else 8),
        context=context,
        kept=config.kept,
        past=context if config.remember_answers else 0,
        shapes=shapes,
        rules=engine.make_rule,
        endings=len(engine.eos_tokens()),
        runtime=engine.runtime,
    )
