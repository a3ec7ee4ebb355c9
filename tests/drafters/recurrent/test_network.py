import pytest
import torch
import torch.nn.functional as F

from redrafter import RecurrentConfig
from redrafter.drafters import RecurrentNet
from redrafter.errors import ConfigError

BASE = {"vocab_size": 11, "context_size": 6, "embedding_size": 5, "state_size": 5, "exit_size": 8, "blocks": 2}


def net(**changes) -> RecurrentNet:
    torch.manual_seed(0)
    return RecurrentNet(RecurrentConfig(**(BASE | changes))).double()


def logits(n: RecurrentNet, state: torch.Tensor) -> torch.Tensor:
    embedding = torch.randn(11, 5, dtype=torch.float64)
    return F.linear(n.features(state, n.share(H)), n.vocabulary(embedding))


E1, E2, H = (torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (5, 5, 6))


def test_the_papers_equations():
    """s1 = e1; s2 = f(U s1 + W e2 + b); g = [s, h]; blocks with skips; softmax over the vocabulary."""
    n = net(exit_size=11)  # state + context: no input projection
    s1 = n.first_state(E1, H)
    assert torch.equal(s1, E1)
    s2 = n.next_state(s1, n.token_input(E2))
    assert torch.allclose(s2, F.silu(s1 @ n.cell_u.weight.T + n.cell_u.bias + E2 @ n.cell_w.weight.T))
    x = torch.cat([s2, H], -1)
    for block in n.blocks:
        x = x + F.silu(x @ block.weight.T + block.bias)
    assert torch.allclose(logits(n, s2), x @ n.head.weight.T)
    assert n.input_proj is None


def test_first_state_zero_reads_the_last_token_from_nothing():
    n = net(first_state="zero")
    assert torch.allclose(n.first_state(E1, H), n.next_state(torch.zeros(2, 5, dtype=torch.float64), n.token_input(E1)))
    assert not torch.equal(n.first_state(E1, H), E1)


def test_first_state_context_reads_it_from_the_context():
    n = net(first_state="context")
    assert not torch.allclose(n.first_state(E1, H), n.first_state(E1, -H))


def test_without_a_cell_states_add_up():
    n = net(cell="none")
    assert torch.equal(n.next_state(n.first_state(E1, H), n.token_input(E2)), E1 + E2)
    assert not hasattr(n, "cell_u")


def test_input_projection_and_heads():
    assert net().input_proj is not None
    assert logits(net(), E1).shape == (2, 11)
    assert logits(net(draft_vocab_size=4), E1).shape == (2, 4)
    tied = net(head="tied")
    assert tied.head.weight.shape == (5, 8)
    assert logits(tied, E1).shape == (2, 11)


def test_the_share_of_the_context_is_the_same_projection():
    n = net()
    together = torch.cat([E1, H], -1) @ n.input_proj.weight.T + n.input_proj.bias
    for block in n.blocks:
        together = together + F.silu(block(together))
    assert torch.allclose(n.features(E1, n.share(H)), together)


def test_a_gated_cell_stands_between_the_old_state_and_the_papers():
    n = net(cell="gated")
    state = torch.randn(2, 5, dtype=torch.float64)
    with torch.no_grad():
        n.cell_u.bias[5:] = -1e9  # the gate shut
        assert torch.equal(n.next_state(state, n.token_input(E1)), state)
        n.cell_u.bias[5:] = 1e9
        new = F.silu(state @ n.cell_u.weight[:5].T + n.cell_u.bias[:5] + E1 @ n.cell_w.weight[:5].T)
        assert torch.allclose(n.next_state(state, n.token_input(E1)), new)


def test_normed_forget_how_large_each_layer_is():
    n = net(normed=True, layers=(0, -1))
    louder = torch.cat([1000 * H[:, :3], 0.01 * H[:, 3:]], -1)
    assert torch.allclose(n.context(louder), n.context(H), rtol=1e-3)
    assert torch.allclose(n.token(50 * E1), n.token(E1))
    assert torch.equal(net().context(louder), louder)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"state_size": 7}, "state_size == embedding_size"),
        ({"state_size": 7, "first_state": "zero", "cell": "none"}, "state_size == embedding_size"),
        ({"draft_vocab_size": 12}, "draft_vocab_size"),
        ({"cell": "lstm"}, "cell must be one of rnn, gated, none"),
        ({"head": "borrowed"}, "head must be one of"),
        ({"layers": ()}, "layers"),
        ({"blocks": -1}, "blocks"),
        ({"memory_heads": -1}, "memory_heads"),
        ({"memory_size": 0}, "memory_size"),
    ],
)
def test_impossible_shapes_are_refused(bad, word):
    with pytest.raises(ConfigError, match=word):
        RecurrentConfig(**(BASE | bad))
