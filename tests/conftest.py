import os
import sys
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, Path(__file__).parent / "core"):
    sys.path.insert(0, str(folder))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
torch.set_num_threads(1)  # tiny models; two workers share two cores


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the user tuned on this machine is no business of the tests."""
    nowhere = tmp_path_factory.getbasetemp() / "no-profiles"
    monkeypatch.setattr("redrafter.engine.profile.folder", lambda: nowhere)
