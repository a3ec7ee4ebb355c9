import os

import pytest
import torch

from redrafter.cli.main import set_environment
from tests.helpers.instructions import lib  # noqa: F401
from tests.helpers.interpreter import speed_up
from tests.helpers.skips import pytest_addoption, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    speed_up()
torch.set_num_threads(1)  # tiny models; two workers share two cores
set_environment()  # read when transformers is first imported


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither read nor write the user's own profiles and self-check verdicts."""
    base = tmp_path_factory.getbasetemp()
    monkeypatch.setattr("redrafter.tuning.store.profile_folder", lambda: base / "no-profiles")
    monkeypatch.setattr("redrafter.targets.verdicts.folder", lambda: base / "verdicts")
    # On a GPU a kept verdict would hide a kernel that a test has changed.
    monkeypatch.setattr("redrafter.targets.verdicts._gpu", lambda device: None)
