import sys
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, Path(__file__).parent / "core"):
    sys.path.insert(0, str(folder))

torch.set_num_threads(1)  # tiny models; two workers share two cores


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
