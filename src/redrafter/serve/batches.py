"""The running batch of a server, and the shapes that its steps may have."""

from redrafter.config import Shape
from redrafter.core.step import Drafter
from redrafter.drafters.traits import only_copies
from redrafter.engine import Engine
from redrafter.runtime.batch import Batch
from redrafter.serve.config import ServeConfig

GPU_LADDER = ("16x5:63", "8x5:31", "8x4:15", "4x3:7", "2x2:3")
CPU_LADDER = ("4x4:7", "3x3:5", "2x3:4", "1x3:3", "1x2:2", "1x1:1")
NGRAM_LADDER = ("1x7:7", "1x4:4", "1x2:2")


def ladder(engine: Engine) -> list[Shape]:
    """Shapes to choose among, the largest first."""
    if not engine.drafts:
        return []
    on_gpu = engine.target.device.type == "cuda"
    names = NGRAM_LADDER if only_copies(engine.drafter) else GPU_LADDER if on_gpu else CPU_LADDER
    return [Shape.of(name) for name in names]


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


def first_shape(engine: Engine, batch: Batch, shapes: list[Shape]) -> Shape | None:
    """What is drafted while nothing is measured: the engine's own shape if the batch has room for it."""
    if not engine.drafts:
        return None
    return engine.shape if batch.fits(engine.shape) else shapes[0]
