"""Training at toy scale: it learns, resumes bit for bit, and survives what a machine can do to it."""

import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter import Shape
from redrafter.drafters import RecurrentConfig, RecurrentDrafter, checkpoint
from redrafter.drafters.base import DrafterNet
from redrafter.drafters.options import DrafterOptions
from redrafter.engine import Engine
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train import trainer
from redrafter.train.batches import epoch_groups, make_batch, sum_positions
from redrafter.train.config import TrainConfig
from redrafter.train.hidden_states import StateSource, open_states, read_layers
from redrafter.train.lock import only_writer
from redrafter.train.run import Run, TrainingFailed
from redrafter.train.schedule import TooSlow
from redrafter.train.setup import make_net
from redrafter.train.state_store import DiskStore, MemoryStore, StateStore
from redrafter.train.trainer import train
from redrafter.tuning.simulate import SimulatedSteps, simulate
from tests.helpers.clock import Clock
from tests.helpers.toys import CONFIG, OPTIONS, make_texts
from tests.helpers.zoo import VOCAB, make_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model(dtype=torch.float32))


@pytest.fixture(scope="module")
def texts(target: Target) -> Texts:
    return make_texts(target)


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def training(self, record: Any) -> None: ...
    def held_out(self, record: Any) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)

    def planned(self, updates: int) -> None:
        self.notes.append(f"planned {updates}")


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "qwen3-moe"))]
)
def test_it_learns(tmp_path: Path, kind: str) -> None:
    target = Target(make_model(kind, torch.float32))
    texts = make_texts(target, count=40)
    done = train(target, texts, tmp_path, options=OPTIONS, config=replace(CONFIG, updates=30, evaluate_every=15))
    losses = [r["loss"] for r in done.records if "loss" in r]
    assert losses[-1] < losses[0]
    before = simulate(
        target, RecurrentDrafter(make_net(target, texts, OPTIONS, 0), target), texts, Shape(width=4, length=3)
    )
    after = simulate(target, RecurrentDrafter.load(tmp_path, target), texts, Shape(width=4, length=3))
    assert after.tokens_per_step > before.tokens_per_step + 0.1
    engine = Engine(target, RecurrentDrafter.load(tmp_path, target))
    plain = engine.plain().generate([[1, 2, 3]], max_new_tokens=16)
    assert engine.generate([[1, 2, 3]], max_new_tokens=16)[0].tokens == plain[0].tokens
    assert all(p.requires_grad and p.grad is None for p in target.model.parameters()), "the target is the user's"


@pytest.mark.parametrize("states", ["recompute", "cache"])
def test_resumed_bit_for_bit(tmp_path: Path, target: Target, texts: Texts, states: str, monkeypatch) -> None:
    config = replace(CONFIG, states=states)
    whole = train(target, texts, tmp_path / "whole", options=OPTIONS, config=config)

    class Killed(BaseException):
        pass

    one_update = trainer._Training._one_update

    def dies(self: Any, rows: list[int], total: int) -> None:
        if self.update == 6:
            raise Killed
        one_update(self, rows, total)

    monkeypatch.setattr(trainer._Training, "_one_update", dies)
    with pytest.raises(Killed):
        train(target, texts, tmp_path / "parts", options=OPTIONS, config=config)
    monkeypatch.undo()
    resumed = train(target, texts, tmp_path / "parts", options=OPTIONS, config=config)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    last = "checkpoints/update-00000012/state.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "parts" / last).read_bytes()
    assert resumed.tokens_per_step == whole.tokens_per_step
    # A damaged newest checkpoint: the one before it serves.
    (tmp_path / "parts" / last).write_bytes(b"\0" * 100)
    (tmp_path / "parts" / "report.html").unlink(missing_ok=True)
    train(target, texts, tmp_path / "parts", options=OPTIONS, config=config)
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "parts" / last).read_bytes()


def test_a_run_goes_on_with_its_own_order_of_tokens(tmp_path: Path, target: Target, texts: Texts, monkeypatch) -> None:
    """Older versions sorted the token ids; the rows of a head of its own are in their order."""

    def sorted_ids(*given: Any) -> DrafterNet:
        net = make_net(*given)
        net.token_ids.copy_(net.token_ids.sort().values)
        return net

    options = replace(OPTIONS, head="own", draft_vocab=20)
    assert make_net(target, texts, options, 0).token_ids.diff().min() < 0, "else there is nothing to confuse"
    monkeypatch.setattr(trainer, "make_net", sorted_ids)
    train(target, texts, tmp_path / "whole", options=options, config=CONFIG)
    train(target, texts, tmp_path / "parts", options=options, config=CONFIG)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "update-00000012")
    monkeypatch.undo()
    train(target, texts, tmp_path / "parts", options=options, config=CONFIG)
    last = "checkpoints/update-00000012/state.safetensors"
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "parts" / last).read_bytes()


def test_unreadable_checkpoints_are_not_begun_anew(tmp_path: Path, target: Target, texts: Texts) -> None:
    train(target, texts, tmp_path, options=OPTIONS, config=CONFIG)
    before = weights(tmp_path)
    for state in tmp_path.glob("checkpoints/*/state.safetensors"):
        state.write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint in .* can be read"):
        train(target, texts, tmp_path, options=OPTIONS, config=CONFIG)
    assert weights(tmp_path) == before


def test_every_process_has_a_text_in_every_update(texts: Texts) -> None:
    rows = torch.arange(len(texts))
    for epoch in range(5):
        groups = epoch_groups(texts, rows, 40, 2, 5, epoch, least=3)
        assert min(len(u) for g in groups for u in g) >= 3
    assert min(len(u) for g in epoch_groups(texts, rows, 40, 2, 5, 0) for u in g) < 3


def test_another_seed_is_another_drafter(tmp_path: Path, target: Target, texts: Texts) -> None:
    """Twin of the one above: the bytes do differ when anything does."""
    train(target, texts, tmp_path / "a", options=OPTIONS, config=CONFIG)
    train(target, texts, tmp_path / "b", options=OPTIONS, config=replace(CONFIG, seed=1))
    assert weights(tmp_path / "a") != weights(tmp_path / "b")


@pytest.mark.parametrize("kind", ["disk", "memory", "memory for two texts", "no memory"])
def test_kept_states_are_those_recomputed(kind: str, tmp_path: Path, target: Target, texts: Texts, monkeypatch) -> None:
    width = 2 * target.hidden_size
    room = {"memory": 1 << 30, "memory for two texts": int(texts.lengths[[3, 1]].sum()) * width * 4, "no memory": -5}
    store: StateStore = (
        DiskStore(tmp_path, texts, width, target.dtype)
        if kind == "disk"
        else MemoryStore(texts, width, target.dtype, target.device, room[kind])
    )
    source, passed = StateSource(target, (0, -1), store), []
    compute = source._compute
    monkeypatch.setattr(source, "_compute", lambda tokens: passed.append(len(tokens)) or compute(tokens))
    for rows in ([3, 1], [1, 5], [5, 3], [1, 3, 5]):
        batch = make_batch(texts, rows)
        kept, fresh = source.fetch(batch, rows), StateSource(target, (0, -1)).fetch(batch, rows)
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        assert torch.allclose(kept.context[real], fresh.context[real], atol=1e-5)
        assert torch.allclose(kept.last[real], fresh.last[real], atol=1e-5)
        assert kept.context.isfinite().all()
    assert passed == {"disk": [2, 2], "memory": [2, 1], "memory for two texts": [2, 1, 1, 1]}.get(kind, [2, 2, 2, 3])


def test_states_that_could_not_be_stored_are_computed_again(target: Target, texts: Texts, monkeypatch) -> None:
    store = MemoryStore(texts, target.hidden_size, target.dtype, target.device, 1 << 30)
    source, batch = StateSource(target, (-1,), store), make_batch(texts, [2, 0])
    with monkeypatch.context() as patch:
        patch.setattr(store, "_slots", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("x")))
        with pytest.raises(torch.OutOfMemoryError):
            source.fetch(batch, [2, 0])
    wanted = StateSource(target, (-1,)).fetch(batch, [2, 0]).last
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    for _ in range(2):  # training goes on after it had too little memory
        assert torch.equal(source.fetch(batch, [2, 0]).last[real], wanted[real])


def test_in_limited_time_a_text_passes_through_the_target_once(tmp_path: Path, target: Target, texts: Texts) -> None:
    for hurries in (False, True):
        source = open_states(None, target, (0,), texts, tmp_path, hurries)
        assert isinstance(source.store, MemoryStore) == hurries


def test_states_in_memory_need_a_gpu(tmp_path: Path, target: Target, texts: Texts) -> None:
    with pytest.raises(ConfigError, match="--states memory needs a GPU"):
        train(target, texts, tmp_path / "a", options=OPTIONS, config=replace(CONFIG, states="memory"))


def test_out_of_memory_is_answered_by_a_smaller_micro_batch(tmp_path: Path, target: Target, texts: Texts, monkeypatch):
    """Hidden states in memory are given up first."""
    gradient = trainer._Training._gradient
    told = Notes()

    def keep_states(_: Any, target: Target, layers: tuple[int, ...], texts: Texts, *__: Any) -> StateSource:
        width = target.hidden_size * len(read_layers(layers))
        return StateSource(target, layers, MemoryStore(texts, width, target.dtype, target.device, 1 << 30))

    def small_machine(self: Any, rows: list[int], total: int, is_last: bool) -> Any:
        if sum_positions(self.texts, rows) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient(self, rows, total, is_last)

    monkeypatch.setattr(trainer, "open_states", keep_states)
    monkeypatch.setattr(trainer._Training, "_gradient", small_machine)
    done = train(target, texts, tmp_path, options=OPTIONS, config=CONFIG, watcher=told)
    assert done.updates == 12
    smaller = ["out of memory: going on with N positions at once"] * 2
    assert [re.sub(r"\d+", "N", n) for n in told.notes] == ["out of memory: hidden states are no longer kept", *smaller]
    monkeypatch.setattr(
        trainer._Training, "_gradient", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("x"))
    )
    with pytest.raises(TrainingFailed, match="even with one text at a time"):
        train(target, texts, tmp_path / "tiny", options=OPTIONS, config=CONFIG)


def test_micro_batches_add_up_to_the_same_update(tmp_path: Path, target: Target, texts: Texts) -> None:
    train(target, texts, tmp_path / "one", options=OPTIONS, config=CONFIG)
    train(target, texts, tmp_path / "many", options=OPTIONS, config=replace(CONFIG, micro_batch=30))
    one, many = (RecurrentDrafter.load(tmp_path / n, target).net for n in ("one", "many"))
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("when", [6, 8])
def test_a_loss_that_is_no_number_stops_before_it_is_saved(
    tmp_path: Path, target: Target, texts: Texts, monkeypatch, when: int
) -> None:
    """Noticed at the update itself, or at the checkpoint whose own update broke the weights."""
    one_update = trainer._Training._one_update

    def breaks(self: Any, rows: list[int], total: int) -> None:
        if self.update == when - 1:
            next(self.net.parameters()).data.view(-1)[0] = math.nan
        one_update(self, rows, total)

    monkeypatch.setattr(trainer._Training, "_one_update", breaks)
    with pytest.raises(TrainingFailed, match=r"not a number at update 8.*smaller --lr"):
        train(target, texts, tmp_path, options=OPTIONS, config=CONFIG)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["update-00000004"]
    assert all(bool(p.isfinite().all()) for p in RecurrentDrafter.load(tmp_path, target).net.parameters())
    monkeypatch.undo()
    assert train(target, texts, tmp_path, options=OPTIONS, config=CONFIG).updates == 12


def test_it_stops_early_when_nothing_gets_better(tmp_path: Path, target: Target, texts: Texts, monkeypatch) -> None:
    seen: list[SimulatedSteps] = []

    def figure(*_: Any) -> SimulatedSteps:
        seen.append(SimulatedSteps(tokens=14 if seen else 15, steps=10, reached=(0, 0, 0)))
        return seen[-1]

    monkeypatch.setattr("redrafter.train.held_out.simulate_batches", figure)
    config = replace(CONFIG, updates=40, evaluate_every=4, patience=2)
    done = train(target, texts, tmp_path, options=OPTIONS, config=config)
    assert (done.updates, done.tokens_per_step, len(seen)) == (12, 1.5, 3)


def test_init_from_another_drafter(tmp_path: Path, target: Target, texts: Texts) -> None:
    train(target, texts, tmp_path / "old", options=OPTIONS, config=replace(CONFIG, updates=20))
    config = replace(CONFIG, updates=2, lr=1e-6, evaluate_every=1)
    fresh = train(target, texts, tmp_path / "fresh", options=OPTIONS, config=config)
    warm = train(target, texts, tmp_path / "warm", config=config, init_from=tmp_path / "old")
    first = [next(r["held_out"]["loss"] for r in t.records if "held_out" in r) for t in (warm, fresh)]
    assert first[0] < first[1]
    other = Target(make_model("llama", torch.float32, hidden_size=16))
    with pytest.raises(DrafterMismatch, match="expects"):
        train(other, texts, tmp_path / "no", config=config, init_from=tmp_path / "old")


def test_what_cannot_be_trained_is_said_in_one_line(tmp_path: Path, target: Target, texts: Texts) -> None:
    train(target, texts, tmp_path / "run", options=OPTIONS, config=CONFIG)
    with pytest.raises(ConfigError, match=r"was begun with train's lr 0.01, now it is 1.0: give the same"):
        train(target, texts, tmp_path / "run", options=OPTIONS, config=replace(CONFIG, lr=1.0))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a drafter or model already"):
        train(target, texts, tmp_path / "taken", options=OPTIONS, config=CONFIG)
    none = texts.select([])
    with pytest.raises(ConfigError, match="0 texts with something to guess"):
        train(target, none, tmp_path / "none", options=OPTIONS, config=CONFIG)
    with pytest.raises(ConfigError, match="layers names hidden state 7"):
        train(target, texts, tmp_path / "layers", options=replace(OPTIONS, layers=(7,)), config=CONFIG)
    for bad, word in (
        ({"lr": 0}, "lr must be above 0"),
        ({"loss": "kl"}, "loss must be one of"),
        ({"depth": 0}, "depth"),
    ):
        with pytest.raises(ConfigError, match=word):
            TrainConfig(**bad)


@pytest.mark.parametrize("place", ["redrafter.train.run.save_file", "redrafter.drafters.files.save_file"])
def test_a_full_disk_loses_nothing(tmp_path: Path, target: Target, texts: Texts, monkeypatch, place: str) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, full)
    with pytest.raises(TrainingFailed, match=r"no space left in .* goes on from the last checkpoint"):
        train(target, texts, tmp_path, options=OPTIONS, config=CONFIG)
    monkeypatch.undo()
    assert train(target, texts, tmp_path, options=OPTIONS, config=CONFIG).updates == 12


def test_the_draft_vocabulary_is_the_most_frequent_tokens(target: Target, texts: Texts) -> None:
    net = make_net(target, texts, replace(OPTIONS, draft_vocab=5), seed=0)
    counts = torch.bincount(texts.tokens.long(), minlength=VOCAB)
    assert net.token_ids is not None
    assert counts[net.token_ids].tolist() == counts.sort(descending=True).values[:5].tolist(), (
        "the first ones suit a CPU"
    )
    assert isinstance(net.config, RecurrentConfig)


def test_a_drafter_learns_more_tokens(tmp_path: Path, target: Target, texts: Texts, monkeypatch) -> None:
    monkeypatch.setattr(DrafterOptions, "draft_vocab", 17)  # the usual number
    short = replace(CONFIG, updates=2)
    train(target, texts, tmp_path / "old", options=replace(OPTIONS, draft_vocab=17), config=short)
    old, _ = checkpoint.read(tmp_path / "old")
    for asked, guessed in ((17, 17), (20, 20), (0, VOCAB), (10 * VOCAB, VOCAB)):
        options, folder = replace(OPTIONS, draft_vocab=asked), tmp_path / f"{asked}"
        train(target, texts, folder, options=options, config=short, init_from=tmp_path / "old")
        new, _ = checkpoint.read(folder)
        assert new.token_ids is not None
        assert new.config.guessable == len(set(new.token_ids.tolist())) == guessed
        assert new.token_ids[:17].tolist() == old.token_ids.tolist()
    fewer = replace(OPTIONS, draft_vocab=3)
    with pytest.raises(ConfigError, match="guesses among 17 tokens, not fewer, but draft_vocab is 3"):
        train(target, texts, tmp_path / "no", options=fewer, config=short, init_from=tmp_path / "old")
    train(target, texts, tmp_path / "own", options=replace(OPTIONS, draft_vocab=17, head="own"), config=short)
    with pytest.raises(ConfigError, match="only a drafter without weights of its own for each"):
        train(target, texts, tmp_path / "no", options=options, config=short, init_from=tmp_path / "own")


def test_minutes_replace_updates(target, texts, tmp_path):
    config = replace(CONFIG, minutes=1 / 20, loss="seeded", patience=0)  # only time ends it
    began, told = time.perf_counter(), Notes()
    done = train(target, texts, tmp_path, options=OPTIONS, config=config, watcher=told)
    assert time.perf_counter() - began < 30, "measured, trained and evaluated"
    assert done.seconds < 5
    assert done.updates != CONFIG.updates
    assert re.match(r"about \d+ updates of at most \d+ positions fit into \d+ s, with ", told.notes[0])
    rates = [r["lr"] for r in done.records if "lr" in r]
    assert rates[-1] < 0.2 * config.lr
    again = Notes()
    assert train(target, texts, tmp_path, options=OPTIONS, config=config, watcher=again).updates == done.updates
    assert again.notes == told.notes[1:], "a run that goes on keeps to its plan"


def test_what_would_end_too_late_is_not_begun(target, texts, tmp_path, monkeypatch):
    """Updates of 0.6 s in a run of 2 s; the time to write the drafter is left."""
    clock, one_update = Clock(), trainer._Training._one_update

    def slow(*args: Any, **options: Any) -> Any:
        clock.now += 0.6
        return one_update(*args, **options)

    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(trainer._Training, "_one_update", slow)
    monkeypatch.setattr(Run, "time_writing", lambda *_: 0.1)
    training = TrainConfig(**vars(CONFIG) | {"minutes": 1 / 30, "patience": 0})
    done = train(target, texts, tmp_path, options=OPTIONS, config=training, watcher=Notes())
    planned = json.loads((max((tmp_path / "checkpoints").iterdir()) / "state.json").read_text())["plan"]["seconds"]
    assert 1.4 < planned <= 2 - 4 * 0.1, "without what the writing takes"
    assert done.updates == 2, "a third would end at 1.8 s"
    assert 2 * 0.6 <= done.seconds <= planned
    assert not (tmp_path / ".speed.part").exists()


def test_without_time_for_a_simulation_there_is_a_drafter_nevertheless(target, texts, tmp_path, monkeypatch):
    def slow(*_: Any, **__: Any) -> float:
        raise TooSlow

    monkeypatch.setattr(trainer._Training, "_time_evaluation", slow)
    config = replace(CONFIG, minutes=1 / 30)
    done = train(target, texts, tmp_path, options=OPTIONS, config=config)
    assert done.updates >= 1
    assert done.tokens_per_step == 0
    assert not [r for r in done.records if "held_out" in r]
    RecurrentDrafter.load(tmp_path, target)
    monkeypatch.undo()
    late = train(target, texts, tmp_path / "late", options=OPTIONS, config=config, seconds=0)
    assert late.updates == 1, "one update, and its drafter"
    RecurrentDrafter.load(tmp_path / "late", target)


def test_a_second_trainer_is_refused(tmp_path: Path, target: Target, texts: Texts) -> None:
    with only_writer(tmp_path), pytest.raises(ConfigError, match="another process writes to"):
        train(target, texts, tmp_path, options=OPTIONS, config=CONFIG)
    assert train(target, texts, tmp_path, options=OPTIONS, config=CONFIG).updates == CONFIG.updates


def test_wrong_arguments(target, texts, tmp_path):
    for call, says in (
        (lambda: train(5, texts, tmp_path), "target must be of type Target, got 5"),
        (lambda: train(target, [[1, 2]], tmp_path), "texts must be of type Texts, got [[1, 2]]"),
        (lambda: train(target, texts, str(tmp_path)), "folder must be of type Path, got '"),
        (lambda: train(target, texts, tmp_path, config={}), "config must be of type TrainConfig, got {}"),
        (lambda: train(target, texts, tmp_path, options=5), "options must be of type DrafterOptions, got 5"),
        (lambda: train(target, texts, tmp_path, shape="3x3"), "shape must be of type Shape, got '3x3'"),
        (lambda: train(target, texts, tmp_path, init_from="x"), "init_from must be of type Path, got 'x'"),
        (lambda: train(target, texts, tmp_path, watcher=5), "watcher must be of type Watcher, got 5"),
        (
            lambda: train(target, Texts.of([[1, 2, VOCAB]] * 4, [1] * 4, [0.0] * 4, [0] * 4), tmp_path),
            f"the texts have token ids outside the vocabulary of {VOCAB}",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            call()
    assert not list(tmp_path.iterdir())
