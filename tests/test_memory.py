"""What does not fit is refused with its size, before anything is allocated."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from redrafter import Engine, Shape, memory
from redrafter.cli.main import main
from redrafter.drafters.ngram import NgramDrafter
from redrafter.drafters.options import DrafterOptions
from redrafter.errors import OutOfMemory
from redrafter.memory import free_bytes, require_room
from redrafter.runtime import bulk, cache
from redrafter.runtime.row import Request
from redrafter.targets import load_target
from redrafter.train.config import TrainConfig
from redrafter.train.setup import check
from redrafter.tuning.at_rest import tune
from tests.helpers.batches import make_batch
from tests.helpers.zoo import PROMPTS, make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return load_target(make_model(dtype=torch.float32))


@pytest.fixture
def _little_memory(monkeypatch):
    """4 KiB are free, and the test fails if a KV cache is made nevertheless."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2.0**12)
    monkeypatch.setattr(cache, "lazy_zeros", lambda *a: pytest.fail("a KV cache was allocated"))


def test_a_refusal_says_what_is_needed_and_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2.0**30)
    require_room("a batch", {"logits": 2**30}, CPU, "use fewer rows")
    with pytest.raises(OutOfMemory) as refused:
        require_room("9 rows", {"keys": 2**31, "nothing": 0, "logits": 2**29}, CPU, "use fewer rows")
    assert str(refused.value) == (
        "9 rows need 2.0 GiB for keys, 0.5 GiB for logits; 1.0 GiB are free on cpu: use fewer rows"
    )


def test_the_free_memory_is_that_of_the_machine_or_of_its_container(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    assert free_bytes(CPU) == math.inf
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    assert free_bytes(CPU) == 8192
    for name, text in (
        ("memory.max", "6000"),
        ("memory.current", "5000"),
        ("memory.stat", "anon 1\ninactive_file 7\n"),
    ):
        (tmp_path / name).write_text(text)
    assert free_bytes(CPU) == 1007
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU) == 8192


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize(
    "size", [{"rows": 60_000}, {"rows": 2, "kept": 60_000}, {"shapes": [Shape(width=1024, length=4)]}]
)
def test_a_batch_is_refused(target, size):
    with pytest.raises(OutOfMemory, match="GiB for keys and values"):
        make_batch(target, NgramDrafter(), **size)


@pytest.mark.usefixtures("_little_memory")
def test_generate_and_tune_are_refused_at_their_start(target):
    engine = Engine(target, NgramDrafter())
    with pytest.raises(OutOfMemory, match=r"rows of .* tokens need .* for keys and values"):
        engine.generate([PROMPTS[0]] * 500, max_new_tokens=80)
    stages = []
    with pytest.raises(OutOfMemory, match=r"^99999999 rows of"):
        tune(engine, row_counts=[1, 99_999_999], progress=lambda *stage: stages.append(stage))
    assert stages == []


def test_training_data_is_written_with_fewer_rows(target, monkeypatch):
    rows = []
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2.0**17)
    monkeypatch.setattr(bulk.log, "info", lambda message, n: rows.append(n))
    texts = bulk.write_texts(target, [Request(prompt=[1], seed=i, max_new_tokens=9) for i in range(64)], rows=64)
    assert len(texts) == 64
    assert rows


def test_a_drafter_too_large_to_train_is_refused(target):
    with pytest.raises(OutOfMemory, match=r"^[\d,]+ M weights need .* for training them; .* --state-size"):
        check(target, DrafterOptions(state_size=2**20), TrainConfig(), Shape())


@pytest.mark.parametrize(
    "lack", [lambda: np.zeros(2**50), lambda: torch.zeros(2**60), lambda: torch.zeros(2**62, 2**62)], ids=range(3)
)
def test_any_other_lack_of_memory_is_one_line(capsys, monkeypatch, lack):
    monkeypatch.setattr("redrafter.cli.generate.run", lambda args: lack())
    assert main(["generate", "hi"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("redrafter: out of memory: ")
    assert err.count("\n") == 1
