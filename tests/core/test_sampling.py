from dataclasses import replace

import pytest
import torch
from transformers.generation import logits_process as theirs

from redrafter import SamplingParams
from redrafter.core.sampling import Sampling, node_counts, node_logits, penalise, restrict
from redrafter.core.tree import pack_beam, root_tree
from redrafter.errors import ConfigError

V = 30
LOGITS = torch.randn(1, 6, V, generator=torch.Generator().manual_seed(0)) * 3


def ours(params, logits=LOGITS):
    return restrict(logits, Sampling.of([params], V, "cpu"))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, V, 10 * V])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_filters_are_transformers(temperature, top_k, top_p, min_p):
    expected = LOGITS[0]
    warpers = [theirs.TemperatureLogitsWarper(temperature)]
    warpers += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [theirs.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        expected = warper(None, expected)
    got = ours(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))[0]
    assert torch.equal(got, expected)


def test_order_matters_and_is_theirs():
    """Top-p after top-k sees renormalised probabilities: 0.5, 0.3 of 0.95 is below 0.85, so the third stays."""
    logits = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.85)
    kept = restrict(logits, Sampling.of([params], 4, "cpu")) > -torch.inf
    assert kept[0, 0].tolist() == [True, True, True, False]
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.84)
    kept = restrict(logits, Sampling.of([params], 4, "cpu")) > -torch.inf
    assert kept[0, 0].tolist() == [True, True, False, False]


def test_a_row_is_not_touched_by_its_neighbours_filters():
    flat = torch.zeros(1, 1, 50_000)  # a long flat tail, where a rounded cumulative sum passes 1
    alone = SamplingParams(temperature=1.0)
    strict = SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1)
    both = restrict(flat.expand(2, -1, -1), Sampling.of([alone, strict], 50_000, "cpu"))
    assert bool(both[0].isfinite().all())


def test_repetition_penalty_is_transformers():
    ids = torch.tensor([[1, 4, 4, 9]])
    counts = torch.zeros(1, V).index_add_(1, ids[0], torch.ones(1, 4))
    sampling = Sampling.of([SamplingParams(repetition_penalty=1.7)], V, "cpu")
    got = penalise(LOGITS[:, :1], sampling, counts, root_tree(torch.tensor([9])))
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.7)(ids, LOGITS[0, :1])
    assert torch.allclose(got[0], expected)


def test_presence_frequency_and_bias():
    counts = torch.zeros(1, V)
    counts[0, 3], counts[0, 5] = 1, 4
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 2.0, 3: -1.0})
    got = penalise(LOGITS[:, :1], Sampling.of([params], V, "cpu"), counts, root_tree(torch.tensor([5])))
    change = (got - LOGITS[:, :1])[0, 0]
    assert change[3].item() == pytest.approx(-1.75)
    assert change[5].item() == pytest.approx(-1.5)
    assert change[7].item() == pytest.approx(2.0)
    change[[3, 5, 7]] = 0
    assert bool((change == 0).all())


def test_each_node_counts_its_own_path():
    beam = torch.tensor([[[1, 2, 2], [1, 3, 1]]])
    tree, _ = pack_beam(beam, torch.tensor([7]))
    counts = torch.zeros(1, V)
    counts[0, 7] = 2
    seen = node_counts(counts, tree)[0]
    for node in range(int(tree.valid.sum())):
        path = tree.tokens[0][tree.mask[0, node]][1:]
        expected = counts[0].clone().index_add_(0, path, torch.ones(len(path)))
        assert torch.equal(seen[node], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_processor_may_change_its_logits_in_place(dtype):
    """The verified logits stay as they are: log-probabilities are computed from them."""
    given = torch.zeros(1, 1, 4, dtype=dtype)
    sampling = replace(Sampling.of([SamplingParams()], 4, "cpu"), processor=lambda logits, _: logits.fill_(1))
    assert node_logits(given, sampling, None, root_tree(torch.tensor([0]))).tolist() == [[[1, 1, 1, 1]]]
    assert given.tolist() == [[[0, 0, 0, 0]]]


def test_processor_runs_after_penalties_and_before_temperature():
    seen = []

    def processor(logits, tree):
        seen.append(logits.clone())
        return logits + 1

    sampling = Sampling.of([SamplingParams(temperature=2.0, logit_bias={0: 5.0})], V, "cpu")
    logits = node_logits(LOGITS[:, :1], replace(sampling, processor=processor), None, root_tree(torch.tensor([0])))
    got = restrict(logits, sampling)
    assert seen[0][0, 0, 0] == LOGITS[0, 0, 0] + 5
    assert torch.allclose(got, (seen[0] + 1) / 2)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_bad_values_are_named(bad, word):
    with pytest.raises(ConfigError, match=word):
        SamplingParams(**bad)
