"""Training at toy scale: settings and texts that several test files share."""

from redrafter.config import SamplingParams
from redrafter.core.noise import fold
from redrafter.drafters.options import DrafterOptions
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.row import Request
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.config import TrainConfig
from tests.helpers.zoo import VOCAB

OPTIONS = DrafterOptions(state_size=32, exit_size=32, blocks=2, draft_vocab=0, memory_heads=2, memory_size=8)
CONFIG = TrainConfig(
    updates=12,
    positions=128,
    together=2,
    depth=3,
    lr=1e-2,
    warmup=2,
    held_out=4,
    checkpoint_every=4,
    evaluate_every=4,
    chunk=50,
)


def make_texts(target: Target, count: int = 24, temperature: float = 0.0, length: int = 20) -> Texts:
    sampling = SamplingParams(temperature=temperature)
    starts = [
        Request(
            prompt=[1 + i % 7, 2 + i % 5, i % VOCAB],
            seed=fold(3, i),
            max_new_tokens=length - i % 5,
            sampling=sampling,
            eos=(11,),
        )
        for i in range(count)
    ]
    written = write_texts(target, starts, rows=8)
    rows = [[*s.prompt, *w] for s, w in zip(starts, written, strict=True)]
    return Texts.of(rows, [3] * count, [temperature] * count, [s.seed for s in starts])
