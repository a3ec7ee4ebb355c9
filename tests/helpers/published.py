"""A tiny published drafter that has learned something: one that has not is refused at load."""

from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.tiny_drafters import TINY
from redrafter.drafters.eagle.loss import training_features
from redrafter.drafters.training import LossInput
from redrafter.interop import conventions, eagle3, published
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.batches import make_batch

NAME = "EAGLE-3, NVIDIA"
"""The format that leaves the most unsaid."""
LEARNED = {"layers": (2, 4, 5), "residual": "normed", "recycled": "normed"}


def train_published(target: Target, before: Path, folder: Path) -> Path:
    """Write a drafter to `folder` that learned to run in one of the ways that its files leave open."""
    tiny = TINY[NAME]()
    learned = published.read(tiny.write(before), target)
    [reading] = [r for r in learned.readings if all(getattr(r.config, k) == v for k, v in LEARNED.items())]
    net = learned.net
    net.config = reading.config
    followed, _ = conventions._written(target)
    batch = make_batch(Texts.of([followed], [2], [0.0], [0]), [0])
    with torch.no_grad():
        states = target.states(batch.tokens, reading.config.layers)
    number = torch.full((target.vocab_size,), -100)
    number[net.token_ids] = torch.arange(len(net.token_ids))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(40):
        features, _ = training_features(net, LossInput(batch, states, target.input_embedding, [1.0] * 3))
        truth = [number[batch.token_at(d + 1)].where(batch.left > d, -100) for d in range(3)]
        loss = F.cross_entropy((features @ net.head.weight.T).flatten(0, 1), torch.cat(truth))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    names = eagle3.names(net.config, "layers.0.")
    tensors = {names.get(own, own): x.detach() for own, x in net.state_dict().items() if own != "token_ids"}
    type(tiny)(tiny.config, tiny.tensors | tensors).write(folder)
    return folder
