"""What training minimises, and which texts it sees in which order."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter.drafters import RecurrentNet
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.batches import all_groups, count_positions, epoch_groups, make_batch
from redrafter.train.hidden_states import StateSource
from redrafter.train.local_rollouts import roll_out_rows
from redrafter.train.losses import LOSSES
from redrafter.train.objective import Objective, States
from redrafter.train.setup import make_net
from tests.helpers.toys import OPTIONS, make_texts
from tests.helpers.zoo import make_model


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
    torch.manual_seed(4)
    noise = -torch.empty(6, 9).exponential_().log()
    choice = (p.float().log() + noise).argmax(-1, keepdim=True)  # p sums to 1, so every choice can be guessed
    reference = {
        "seeded": -(logits + noise).log_softmax(-1).gather(1, choice)[:, 0],
        "hard": torch.where(label >= 0, -q.gather(1, label.clamp(min=0)[:, None])[:, 0], 0.0),
        "soft": -(p * q).sum(-1),
        "acceptance": -torch.minimum(p, q.exp()).sum(-1).log(),
    }[name]
    (expected,) = torch.autograd.grad(reference.sum(), logits)
    torch.manual_seed(4)
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
                state = (
                    net.first_state(token, context) if state is None else net.next_state(state, net.token_input(token))
                )
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


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "seeded"])  # it draws noise for each chunk
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
    states = StateSource(target, net.config.layers).fetch(batch, [2, 0, 1])
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
    for loss in ("hard", "soft", "acceptance"):
        objective = Objective(net, target, depth=3, loss=loss, decay=0.8, chunk=64, bf16=False)
        values = []
        for data in (texts, with_rollouts):
            batch = make_batch(data, [0, 1, 2, 3])
            keep = batch.at < (batch.lengths[batch.row] - 4)  # positions at which the text has all three depths
            fields = {
                k: v[keep] if v is not None and k in ("row", "at", "left", "rollouts") else v
                for k, v in vars(batch).items()
            }
            states = StateSource(target, net.config.layers).fetch(batch, [0, 1, 2, 3])
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


def test_micro_batches_add_up_to_the_same_gradient() -> None:
    target = Target(make_model())
    texts = make_texts(target, count=4, length=12)
    net = make_net(target, texts, OPTIONS, seed=1).double()
    objective = Objective(net, target, depth=3, loss="soft", decay=0.8, chunk=64, bf16=False)

    def gradients(parts: list[list[int]]) -> list[Tensor]:
        net.zero_grad()
        for rows in parts:
            batch = make_batch(texts, rows)
            objective(batch, StateSource(target, net.config.layers).fetch(batch, rows))[0].backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    whole, split, less = gradients([[0, 1, 2, 3]]), gradients([[0], [1, 2], [3]]), gradients([[0], [1, 2]])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, split, strict=True))
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, less, strict=True))
