"""transformers' assisted generation with our verification."""

import pytest
import torch
import transformers as tf
from scipy.stats import chisquare
from transformers.generation import utils

from redrafter import kernels
from redrafter.errors import ConfigError
from redrafter.interop import transformers as interop
from redrafter.interop.transformers import speculative_sampling, use_fused_verification
from tests.helpers.zoo import COMMON, VOCAB

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = tf.LlamaConfig(**COMMON, initializer_range=0.3)
    target = tf.LlamaForCausalLM(config).eval()
    assistant = tf.LlamaForCausalLM(config).eval()
    ours, theirs = dict(target.named_parameters()), dict(assistant.named_parameters())
    with torch.no_grad():  # a drafter that is often right
        for name, weight in theirs.items():
            weight.copy_(ours[name] + 0.02 * torch.randn_like(weight))
    return target.to(DEVICE), assistant.to(DEVICE)


def generate(models, seed, **options):
    torch.manual_seed(seed)
    prompt = torch.tensor([[1, 2, 3]], device=DEVICE)
    settings = {"do_sample": True, "max_new_tokens": 24, "top_k": 0} | options
    return models[0].generate(
        prompt, attention_mask=torch.ones_like(prompt), assistant_model=models[1], pad_token_id=0, **settings
    )[0, 3:]


@pytest.mark.parametrize("options", [{}, {"top_k": 5, "temperature": 0.7}, {"top_p": 0.8}], ids=str)
def test_generate(models, options):
    calls = []

    def counting(*args):
        new, accepted = speculative_sampling(*args)
        calls.append(int(accepted))
        return new, accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interop, "speculative_sampling", counting)
        with use_fused_verification():
            text = generate(models, 1, **options)
            again = generate(models, 1, **options)
    assert len(text) == 24
    assert torch.equal(text, again)
    assert max(calls) > 0, "no guess was ever accepted"
    assert min(calls) < 5


def test_only_inside(models):
    original = utils._speculative_sampling
    before = generate(models, 2)
    with use_fused_verification():
        assert utils._speculative_sampling is not original
    assert utils._speculative_sampling is original
    with pytest.raises(RuntimeError, match="inside"), use_fused_verification():
        raise RuntimeError("inside")
    assert utils._speculative_sampling is original
    assert torch.equal(generate(models, 2), before)


def test_an_ensemble_is_left_to_transformers(models):
    with use_fused_verification():
        inside = generate(models, 3, assistant_ensemble_weight=0.5)
    assert torch.equal(inside, generate(models, 3, assistant_ensemble_weight=0.5))


def test_no_such_function(monkeypatch):
    monkeypatch.delattr(utils, "_speculative_sampling")
    with pytest.raises(ConfigError, match="no function _speculative_sampling"), use_fused_verification():
        pass


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in Triton's interpreter, warns of every overflow
def test_the_kernel_gives_the_oracles_text(models):
    pytest.importorskip("triton", reason="triton is not installed")
    texts = []
    for implementation in ("naive", "triton"):
        with kernels.force(implementation), use_fused_verification():
            texts.append(generate(models, 4, max_new_tokens=12))
    assert torch.equal(*texts)


def test_distribution():
    """The first new token of a verification has the target's distribution."""
    p, q = torch.randn(1, 3, VOCAB), torch.randn(1, 2, VOCAB)
    draws = 2000
    seen = torch.zeros(VOCAB)
    for guess in torch.multinomial(q[0].softmax(-1), draws, replacement=True).T:
        new, _ = speculative_sampling(guess[None], q, 2, p)
        seen[new[0, 0]] += 1
    assert chisquare(seen.numpy(), (p[0, 0].double().softmax(-1) * draws).numpy()).pvalue > 1e-3
