"""A causal LM as a drafter: its embedding may have fewer rows than the target's, as in families that pad them apart."""

import pytest
import torch

from redrafter import Engine, Gamma, Shape
from redrafter.drafters import ModelDrafter, WithNgrams
from redrafter.targets import load_target
from tests.helpers.letters import tokenizer
from tests.helpers.zoo import VOCAB, make_model

MORE = 8
"""Tokens that the draft model does not have."""
PROMPT = [1, VOCAB + 2, 3, VOCAB + 2, 3, VOCAB + 2]
OPTIONS = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "logit_bias": {VOCAB + 2: 4.0, VOCAB + 5: 4.0}}


@pytest.fixture(scope="module")
def models():
    shared = tokenizer()
    target = load_target(make_model(vocab_size=VOCAB + MORE), tokenizer=shared)
    return target, load_target(make_model(), tokenizer=shared)


@pytest.mark.parametrize("gamma", ["constant", "heuristic", "confidence:0.1"])
@pytest.mark.parametrize("ngrams", [False, True], ids=["alone", "ngram"])
def test_tokens_that_only_the_target_has(models, gamma, ngrams):
    target, small = models
    drafter = ModelDrafter(small, target, gamma=Gamma.of(gamma))
    engine = Engine(target, WithNgrams(drafter) if ngrams else drafter, shape=Shape(width=2, length=4))
    written = engine.generate(PROMPT, **OPTIONS).tokens
    assert written == engine.plain().generate(PROMPT, **OPTIONS).tokens
    assert max(written) >= VOCAB, "the text has tokens that the draft model does not have"


def test_tokens_that_only_the_target_has_twin(models):
    """Without care the draft model's embedding has no row for them."""
    _, small = models
    with pytest.raises(IndexError):
        small.prefill(torch.tensor([PROMPT]), [len(PROMPT)], ModelDrafter(small, small).new_cache(16), ())
