import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
torch.set_num_threads(1)  # tiny models; two workers share two cores


@pytest.fixture(autouse=True, scope="session")
def _hashed_once() -> Iterator[None]:
    """The default model is half a gigabyte, and many tests load it."""
    from redrafter.targets import default  # not before the interpreter is asked for

    whole, known = default._sha256, {}

    def remembered(path: Path) -> str:
        about = path.stat()
        key = path, about.st_size, about.st_mtime_ns
        if key not in known:
            known[key] = whole(path)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "_sha256", remembered)
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the user tuned on this machine is no business of the tests."""
    nowhere = tmp_path_factory.getbasetemp() / "no-profiles"
    monkeypatch.setattr("redrafter.tuning.store.profile_folder", lambda: nowhere)
