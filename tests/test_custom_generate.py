"""transformers' own generate, with our decoding method."""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from redrafter import Shape, custom_generate
from redrafter.errors import ConfigError
from redrafter.targets import load_target
from zoo import PROMPTS, make_model, recurrent_drafter

NEW = 15


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def ours(model):
    target = load_target(model)
    return {
        "custom_generate": custom_generate,
        "drafter": recurrent_drafter(target),
        "shape": Shape(width=3, length=3),
    }


def padded():
    """Left-padded as transformers wants it; the pad id 0 is also a real token of the last prompt."""
    width = max(len(p) for p in PROMPTS)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    return {"inputs": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 5},
        {"bad_words_ids": [[3], [7, 1]]},
        {"max_length": 20},
    ],
    ids=str,
)
def test_greedy_is_theirs(model, ours, options):
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW} | options
    if "max_length" in options:
        del options["max_new_tokens"]
    assert torch.equal(model.generate(**padded(), **options, **ours), model.generate(**padded(), **options))


def test_eos_and_padding_are_theirs(model, ours):
    free = model.generate(**padded(), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    eos = int(free[0, padded()["inputs"].shape[1] + 6])
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": eos}
    expected = model.generate(**padded(), **options)
    assert not torch.equal(expected, free)
    assert torch.equal(model.generate(**padded(), **options, **ours), expected)


def test_their_processor_and_criteria(model, ours):
    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == 11

    options = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
        "logits_processor": [NoRepeatNGramLogitsProcessor(2)],
        "stopping_criteria": StoppingCriteriaList([Stop()]),
    }
    assert torch.equal(model.generate(**padded(), **options, **ours), model.generate(**padded(), **options))


def test_sampling_repeats_with_torchs_seed_and_equals_plain(model, ours):
    options = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "max_new_tokens": NEW,
        "pad_token_id": 0,
    }

    def run(drafter):
        torch.manual_seed(5)
        return model.generate(**padded(), **options, **(ours | {"drafter": drafter}))

    first = run(ours["drafter"])
    assert torch.equal(run(ours["drafter"]), first)
    assert torch.equal(run(None), first)
    assert not torch.equal(model.generate(**padded(), **options, **ours), first), "another seed, another text"


def test_num_return_sequences_and_dict(model, ours):
    options = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 3, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([PROMPTS[0]]), pad_token_id=0, **options, **ours).sequences
    assert out.shape[0] == 3
    assert len({tuple(r) for r in out.tolist()}) == 3


def test_beams_are_refused(model, ours):
    with pytest.raises(ConfigError, match="num_beams=2"):
        model.generate(**padded(), num_beams=2, do_sample=False, max_new_tokens=4, pad_token_id=0, **ours)
