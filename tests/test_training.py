"""Training at toy scale: it learns, resumes bit for bit, and survives what a machine can do to it."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter import Shape
from redrafter.config import RecurrentConfig
from redrafter.core.noise import fold
from redrafter.core.recurrent import RecurrentNet
from redrafter.drafters import NgramDrafter, NoDrafter, RecurrentDrafter
from redrafter.engine import Engine
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.eager import Start
from redrafter.targets import Target
from redrafter.train import trainer
from redrafter.train.batches import all_groups, count_positions, epoch_groups, make_batch, sum_positions
from redrafter.train.begin import make_net
from redrafter.train.config import DrafterOptions, TrainConfig
from redrafter.train.local import roll_out_rows
from redrafter.train.losses import LOSSES
from redrafter.train.objective import Objective, States
from redrafter.train.run import TrainingFailed
from redrafter.train.simulate import Walked, simulate
from redrafter.train.states import StateSource
from redrafter.train.texts import Texts
from redrafter.train.trainer import train
from zoo import VOCAB, make_model

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
    starts = [Start([1 + i % 7, 2 + i % 5, i % VOCAB], fold(3, i), length - i % 5, (11,)) for i in range(count)]
    written = write_texts(target, starts, [temperature] * count, rows=8)
    rows = [[*s.prompt, *w] for s, w in zip(starts, written, strict=True)]
    return Texts.of(rows, [3] * count, [temperature] * count, [s.seed for s in starts])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model(dtype=torch.float32))


@pytest.fixture(scope="module")
def texts(target: Target) -> Texts:
    return make_texts(target)


# --- what is minimised ---


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_in_closed_form(name: str) -> None:
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    p = torch.randn(6, 9, dtype=torch.float64).softmax(-1)
    label = torch.tensor([0, 3, -1, 8, 2, 5])
    q = logits.log_softmax(-1)
    reference = {
        "hard": torch.where(label >= 0, -q.gather(1, label.clamp(min=0)[:, None])[:, 0], 0.0),
        "soft": -(p * q).sum(-1),
        "acceptance": -torch.minimum(p, q.exp()).sum(-1).log(),
    }[name]
    (expected,) = torch.autograd.grad(reference.sum(), logits)
    value, gradient = LOSSES[name](logits.detach(), p, label)
    assert torch.allclose(value, reference.float().detach().to(value.dtype), atol=1e-5)
    assert torch.allclose(gradient, expected.to(gradient.dtype), atol=1e-5)
    assert float(gradient.abs().max()) > 1e-2


def naive(net: RecurrentNet, target: Target, texts: Texts, depth: int, name: str, decay: float) -> Tensor:
    """Position by position, with whole logits and the engine's own drafter state: what the objective must sum up to."""
    total = torch.zeros((), dtype=torch.float64)
    for index in range(len(texts)):
        tokens = texts.row(index).long()
        prompt = int(texts.prompts[index])
        read = target.states(tokens[None], (*net.config.layers, -1))[0].detach()
        hidden, last = read[:, : -target.hidden_size], read[:, -target.hidden_size :]
        head = target.output_embedding.weight.detach()
        rows = head if net.token_ids is None else head[net.token_ids]
        for t in range(prompt - 1, len(tokens) - 2):
            context = net.context(hidden[t])
            memory = None
            if net.memory is not None:
                pairs = torch.cat(
                    [net.context(hidden[: t + 1]), net.token(target.input_embedding(tokens[1 : t + 2]))], -1
                )
                memory = net.memory.add(net.memory.empty(1), pairs[None], torch.tensor([t + 1]))
            state, reach = None, 1.0
            for d in range(min(depth, len(tokens) - 2 - t)):
                token = net.token(target.input_embedding(tokens[t + 1 + d]))
                state = net.first_state(token, context) if state is None else net.next_state(state, token)
                reading = None if net.memory is None else net.memory.read(memory, state[None, None])[0, 0]
                q = (net.vocabulary(rows) @ net.features(state, net.share(context), reading)).log_softmax(-1)
                p = (rows @ last[t + 1 + d]).softmax(-1)
                label = int(tokens[t + 2 + d])
                if net.token_ids is not None:
                    found = (net.token_ids == label).nonzero()
                    label = int(found) if len(found) else -1
                value = {
                    "hard": lambda q=q, label=label: -q[label] if label >= 0 else torch.zeros(()),
                    "soft": lambda q=q, p=p: -(p * q).sum(),
                    "acceptance": lambda q=q, p=p: -torch.minimum(p, q.exp()).sum().log(),
                }[name]()
                total = total + decay**d * reach * value
                if name == "acceptance":
                    reach *= float((-value.detach()).exp())
    return total


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory_heads": 0, "cell": "rnn", "head": "own"},
        {"draft_vocab": 20, "cell": "none", "first_state": "zero", "state_size": None, "exit_size": None},
        {"head": "own", "draft_vocab": 20, "normed": False, "first_state": "embedding", "state_size": None},
    ],
)
def test_the_objective_is_the_sum_over_positions_and_depths(name: str, changes: dict[str, Any]) -> None:
    """Loss and gradients in chunks, against the plain double loop over positions and depths."""
    target = Target(make_model())
    texts = make_texts(target, count=3, length=9)
    net = make_net(target, texts, replace(OPTIONS, **changes), seed=1).double()
    objective = Objective(net, target, depth=3, loss=name, decay=0.8, chunk=5, bf16=False)
    batch = make_batch(texts, [2, 0, 1])
    states = StateSource(target, net.config.layers, texts).fetch(batch, [2, 0, 1])
    loss, score = objective(batch, states)
    loss.backward()
    found = {k: p.grad.clone() for k, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    expected = naive(net, target, texts, 3, name, 0.8)
    expected.backward()
    assert torch.allclose(loss.double(), expected, rtol=1e-5)
    assert found.keys() == {k for k, p in net.named_parameters() if p.grad is not None}
    for name_, parameter in net.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(found[name_], parameter.grad, rtol=1e-3, atol=1e-5), name_
    left = texts.lengths - texts.prompts
    assert score.count.tolist() == [float((left - 1 - d).clamp(min=0).sum()) for d in range(3)]


def test_rollouts_are_learned_from_like_the_text_they_would_be(target: Target) -> None:
    """On greedy texts a rollout is the text itself, so both ways must give the same loss."""
    target = Target(make_model())
    texts = make_texts(target, count=4, length=12)
    rollouts = roll_out_rows(target, [texts.row(i).tolist() for i in range(4)], 4)
    with_rollouts = replace(texts, rollouts=torch.cat(rollouts).int())
    net = make_net(target, texts, OPTIONS, seed=1).double()
    for loss in LOSSES:
        objective = Objective(net, target, depth=3, loss=loss, decay=0.8, chunk=64, bf16=False)
        values = []
        for data in (texts, with_rollouts):
            batch = make_batch(data, [0, 1, 2, 3])
            keep = batch.at < (batch.lengths[batch.row] - 4)  # positions at which the text has all three depths
            fields = {
                k: v[keep] if v is not None and k in ("row", "at", "left", "rollouts") else v
                for k, v in vars(batch).items()
            }
            states = StateSource(target, net.config.layers, data).fetch(batch, [0, 1, 2, 3])
            if states.rollouts is not None:
                states = States(states.context, states.last, states.rollouts[keep])
            if data is texts:  # depth 2 and 3 of the last positions are read off later positions: keep them there
                plain = make_batch(data, [0, 1, 2, 3])
                objective_left = torch.where(keep, plain.left, 0)
                batch = replace(plain, left=objective_left)
            else:
                batch = type(batch)(**fields)
            values.append(float(objective(batch, states)[0].detach()))
        assert values[0] == pytest.approx(values[1], rel=1e-5)


# --- which texts, in which order ---


@pytest.mark.parametrize("together", [1, 3])
def test_every_text_once_per_epoch_in_an_order_of_its_own(texts: Texts, together: int) -> None:
    rows = torch.arange(len(texts))
    first, second = (epoch_groups(texts, rows, 64, together, seed=5, epoch=e) for e in (0, 1))
    assert sorted(r for g in first for u in g for r in u) == rows[count_positions(texts) > 0].tolist()
    assert first != second
    assert all(len(g) <= together for g in first)
    assert all(sum(int(count_positions(texts)[r]) for u in g for r in u) <= 64 * together for g in first)

    def updates(start: int, count: int) -> list[list[int]]:
        stream = (u for group, skip in all_groups(texts, rows, 64, together, 5, start) for u in group[skip:])
        return [next(stream) for _ in range(count)]

    whole = updates(0, 12)
    for start in range(10):
        assert updates(start, 2) == whole[start : start + 2]


# --- tokens/step, simulated ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_simulated_tokens_per_step_are_the_engines(kind: str, temperature: float) -> None:
    target = Target(make_model(kind))
    texts = make_texts(target, temperature=temperature)
    shape = Shape(width=4, length=3, nodes=7)
    net = make_net(target, texts, OPTIONS, seed=1)
    for drafter in (RecurrentDrafter(net, target), NgramDrafter(), NoDrafter()):
        walked = simulate(target, drafter, texts, shape)
        engine = Engine(target, drafter, shape=shape)
        steps = tokens = 0
        for i in range(len(texts)):
            prompt = texts.row(i)[:3].tolist()
            request = engine.requests(
                [prompt], max_new_tokens=20 - i % 5, seed=int(texts.seeds[i]), temperature=temperature
            )[0]
            done = engine.complete([replace(request, eos=(11,))])[0]
            assert done.tokens == texts.row(i)[3:].tolist()
            steps += done.stats.steps
            tokens += done.stats.tokens - 1
        assert (walked.tokens, walked.steps) == (tokens, steps)
    assert walked.tokens_per_step == 1.0


# --- training ---


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "qwen3-moe"])
def test_it_learns(tmp_path: Path, kind: str) -> None:
    target = Target(make_model(kind, torch.float32))
    texts = make_texts(target, count=40)
    done = train(target, texts, tmp_path, options=OPTIONS, config=replace(CONFIG, updates=60, evaluate_every=20))
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


def test_cached_states_are_those_recomputed(tmp_path: Path, target: Target, texts: Texts) -> None:
    source = StateSource(target, (0, -1), texts, tmp_path)
    for rows in ([3, 1], [1, 5], [5, 3]):
        batch = make_batch(texts, rows)
        stored, fresh = source.fetch(batch, rows), StateSource(target, (0, -1), texts).fetch(batch, rows)
        real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
        assert torch.allclose(stored.context[real], fresh.context[real], atol=1e-5)
        assert torch.allclose(stored.last[real], fresh.last[real], atol=1e-5)


def test_out_of_memory_is_answered_by_a_smaller_micro_batch(tmp_path: Path, target: Target, texts: Texts, monkeypatch):
    gradient = trainer._Training._gradient
    notes: list[str] = []

    def small_machine(self: Any, rows: list[int], total: int, is_last: bool) -> Any:
        if sum_positions(self.texts, rows) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient(self, rows, total, is_last)

    class Watcher:
        def training(self, record: Any) -> None: ...
        def held_out(self, record: Any) -> None: ...
        def note(self, text: str) -> None:
            notes.append(text)

    monkeypatch.setattr(trainer._Training, "_gradient", small_machine)
    done = train(target, texts, tmp_path, options=OPTIONS, config=CONFIG, watcher=Watcher())
    assert done.updates == 12
    assert [re.sub(r"\d+", "N", n) for n in notes] == ["out of memory: going on with N positions at once"] * 2
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
    seen: list[Walked] = []

    def figure(*_: Any) -> Walked:
        seen.append(Walked(tokens=14 if seen else 15, steps=10, reached=(0, 0, 0)))
        return seen[-1]

    monkeypatch.setattr(trainer, "simulate", figure)
    config = replace(CONFIG, updates=40, evaluate_every=4, patience=2)
    done = train(target, texts, tmp_path, options=OPTIONS, config=config)
    assert (done.updates, done.tokens_per_step, len(seen)) == (12, 1.5, 3)


def test_init_from_another_drafter(tmp_path: Path, target: Target, texts: Texts) -> None:
    train(target, texts, tmp_path / "old", options=OPTIONS, config=replace(CONFIG, updates=40))
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
        ({"lr": 0}, "lr must be positive"),
        ({"loss": "kl"}, "loss must be one of"),
        ({"depth": 0}, "depth"),
    ):
        with pytest.raises(ConfigError, match=word):
            TrainConfig(**bad)


@pytest.mark.parametrize("place", ["redrafter.train.run.save_file", "redrafter.drafters.checkpoint.save_file"])
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
    assert sorted(counts[net.token_ids].tolist()) == counts.sort().values[-5:].tolist()
    assert isinstance(net.config, RecurrentConfig)
