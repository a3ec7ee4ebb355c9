"""Endings, long prompts, prompt caches, the functions shaped like mlx-lm's, and what is refused."""

import importlib

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.generate import stream_generate as mlx_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper
from zoo import COMMON, PROMPTS, OracleDrafter, make_model, recurrent_drafter

import redrafter_mlx
from benchmarks.smoke import byte_tokenizer
from redrafter_mlx import api, decode
from redrafter_mlx import target as target_module
from redrafter_mlx.api import Engine
from redrafter_mlx.config import Shape
from redrafter_mlx.decode import PromptCache
from redrafter_mlx.drafter import NgramDrafter, NoDrafter, make_drafter
from redrafter_mlx.errors import ConfigError, DrafterMismatch, ModelNotFound, UnsupportedTarget
from redrafter_mlx.network import RecurrentConfig
from redrafter_mlx.target import Target

SHAPE = Shape(width=3, length=4, nodes=9)


@pytest.fixture
def target():
    made = Target(make_model())
    yield made
    made.release()


@pytest.fixture(scope="module")
def spoken():
    """A model with a tokenizer of bytes."""
    tokenizer = TokenizerWrapper(byte_tokenizer())
    made = Target(make_model(fresh=True, vocab_size=257), tokenizer)
    return made


def oracle_for(target, prompts, plain, skill=0.8):
    return Engine(target, OracleDrafter(prompts, plain, skill), SHAPE)


def test_every_ending(target, monkeypatch):
    """Any length, and an end-of-sequence token at any place, one row or a ragged batch whose rows end apart."""
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=14)]
    for length in (1, 2, 5):
        done = oracle_for(target, PROMPTS, plain).generate(PROMPTS, max_new_tokens=length)
        assert [c.tokens for c in done] == [t[:length] for t in plain]
        assert {c.finish_reason for c in done} == {"length"}
    for eos in {plain[0][4], plain[2][1], plain[3][0]}:
        monkeypatch.setattr(Engine, "eos_tokens", lambda self, eos=eos: [eos])
        expected = [t[: t.index(eos) + 1] if eos in t else t for t in plain]
        done = oracle_for(target, PROMPTS, plain).generate(PROMPTS, max_new_tokens=14)
        assert [c.tokens for c in done] == expected
        assert [c.finish_reason for c in done] == ["stop" if eos in t else "length" for t in plain]
        past = oracle_for(target, PROMPTS, plain).generate(PROMPTS, max_new_tokens=14, ignore_eos=True)
        assert [c.tokens for c in past] == plain


def test_the_end_of_the_context():
    target = Target(make_model(fresh=True, max_position_embeddings=20))
    plain = Engine(target, NoDrafter()).generate(PROMPTS[2], max_new_tokens=50)
    assert len(plain.tokens) == 20 - len(PROMPTS[2])
    assert (
        oracle_for(target, [PROMPTS[2]], [plain.tokens]).generate(PROMPTS[2], max_new_tokens=50).tokens == plain.tokens
    )
    with pytest.raises(ConfigError, match="context of 20"):
        Engine(target, NoDrafter()).generate(list(range(20)))


def test_stop_strings(spoken):
    whole = Engine(spoken, NoDrafter()).generate("Once", max_new_tokens=24, temperature=1.0, seed=4)
    ids = spoken.tokenizer.encode("Once")
    for stop in (whole.text[5:7], whole.text[9]):
        at = whole.text.index(stop)
        for drafter in (NoDrafter(), OracleDrafter([ids], [whole.tokens], 0.9), recurrent_drafter(spoken)):
            made = Engine(spoken, drafter, SHAPE)
            done = made.generate(ids, max_new_tokens=24, temperature=1.0, seed=4, stop=stop)
            assert done.text == whole.text[:at]
            assert done.finish_reason == "stop"
            assert done.tokens == whole.tokens[: len(done.tokens)]
    parts = list(Engine(spoken, NoDrafter()).stream("Once", max_new_tokens=24, temperature=1.0, seed=4))
    assert "".join(p.text for p in parts) == whole.text


def test_long_prompts_are_read_in_pieces(target, monkeypatch):
    prompt = [(7 * i + i // 5) % 40 for i in range(150)]
    drafter = recurrent_drafter(target)
    whole = Engine(target, drafter, SHAPE).generate(prompt, max_new_tokens=12)
    plain = Engine(target, NoDrafter()).generate(prompt, max_new_tokens=12)
    passes = []
    run = Target.run
    monkeypatch.setattr(target_module, "PIECE", 16)
    monkeypatch.setattr(
        Target, "run", lambda self, tokens, *rest: passes.append(tokens.shape[1]) or run(self, tokens, *rest)
    )
    pieces = Engine(target, drafter, SHAPE).generate(prompt, max_new_tokens=12)
    assert pieces.tokens == whole.tokens == plain.tokens
    assert pieces.stats.nodes == whole.stats.nodes, "the drafter read the same hidden states"
    assert max(passes) == 16
    own = [token for token, _ in generate_step(mx.array(prompt), target.model, max_tokens=12)]
    assert own == plain.tokens


def test_the_prompt_cache_between_turns(target):
    """A second turn that begins with the first turn's prompt and text reads only the rest, and writes the same."""
    drafter = recurrent_drafter(target)
    made = Engine(target, drafter, SHAPE)
    kept = PromptCache()
    first = made.generate(PROMPTS[2], max_new_tokens=10, prompt_cache=kept)
    second = PROMPTS[2] + first.tokens + [4, 2, 9]
    again = made.generate(second, max_new_tokens=10, prompt_cache=kept)
    fresh = made.generate(second, max_new_tokens=10)
    assert again.tokens == fresh.tokens
    assert (again.stats.steps, again.stats.nodes) == (fresh.stats.steps, fresh.stats.nodes), "the same guesses"
    assert again.stats.reused == len(PROMPTS[2]) + 9
    assert fresh.stats.reused == 0
    other = made.generate([*second[:5], 1, 2, 3], max_new_tokens=10, prompt_cache=kept)
    assert other.stats.reused == 5
    assert other.tokens == made.generate([*second[:5], 1, 2, 3], max_new_tokens=10).tokens
    same = made.generate([*second[:5], 1, 2, 3], max_new_tokens=10, prompt_cache=kept)
    assert same.tokens == other.tokens
    assert same.stats.reused == 7


def test_shaped_like_mlx_lm(spoken):
    """The same responses as mlx-lm's `stream_generate`, token by token."""
    own = list(mlx_stream(spoken.model, spoken.tokenizer, "Hello there", max_tokens=12))
    made = Engine(spoken, NgramDrafter())
    found = list(redrafter_mlx.stream_generate(made, spoken.tokenizer, "Hello there", max_tokens=12))
    assert [r.token for r in found] == [r.token for r in own]
    assert "".join(r.text for r in found) == "".join(r.text for r in own)
    assert [r.finish_reason for r in found] == [r.finish_reason for r in own]
    assert [r.generation_tokens for r in found] == [r.generation_tokens for r in own]
    assert found[0].prompt_tokens == own[0].prompt_tokens
    for one, other in zip(found, own, strict=True):
        assert mx.allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert redrafter_mlx.generate(made, spoken.tokenizer, "Hello there", max_tokens=12, verbose=False) == "".join(
        r.text for r in own
    )
    assert redrafter_mlx.stream is redrafter_mlx.stream_generate


@pytest.mark.parametrize("option", api.REPLACED)
def test_options_of_mlx_lm_that_have_other_words(option, spoken):
    with pytest.raises(ConfigError, match=f"has no {option}"):
        redrafter_mlx.generate(Engine(spoken, NoDrafter()), spoken.tokenizer, "Hi", **{option: object()})


def test_what_is_refused(spoken, target, tmp_path, monkeypatch):
    made = Engine(spoken, NoDrafter())
    for wrong, message in (
        ({"max_new_tokens": 0}, "at least 1"),
        ({"stop": ""}, "stop string is empty"),
        ({"heat": 1}, "no option 'heat'"),
        ({"temperature": -1}, "temperature"),
        ({"seed": [1, 2]}, "2 seeds for 1"),
        ({"batch_size": 0}, "batch_size"),
    ):
        with pytest.raises(ConfigError, match=message):
            made.generate("Hi", **wrong)
    with pytest.raises(ConfigError, match="prompt is empty"):
        made.generate("")
    with pytest.raises(ConfigError, match="outside"):
        made.generate([999])
    with pytest.raises(ConfigError, match="without a tokenizer"):
        Engine(target, NoDrafter()).generate("Hi")
    with pytest.raises(ConfigError, match="role"):
        made.generate([{"content": "x"}])
    with monkeypatch.context() as patch:
        patch.setattr(spoken.tokenizer._tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
        with pytest.raises(ConfigError, match="refuses the messages: no system role"):
            made.generate([{"role": "system", "content": "x"}])
    with pytest.raises(ConfigError, match=r"what redrafter_mlx\.load returns"):
        redrafter_mlx.generate(spoken.model, spoken.tokenizer, "Hi")
    with pytest.raises(ModelNotFound, match="cannot find the model"):
        redrafter_mlx.load(str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFound, match="no drafter for"):
        make_drafter("recurrent", target)
    assert isinstance(make_drafter("auto", target), NgramDrafter)
    with pytest.raises(ConfigError, match="n-grams mix"):
        make_drafter("ngram+ngram", target)
    sizes = {"embedding_size": 64, "context_size": 64, "state_size": 8, "exit_size": 8, "first_state": "zero"}
    for change, message in (
        ({"vocab_size": 41}, "vocabulary of 41"),
        ({"vocab_size": 40, "layers": (5,)}, "hidden state 5"),
        ({"vocab_size": 40, "context_size": 32}, "context of 32"),
    ):
        with pytest.raises(DrafterMismatch, match=message):
            target.check_sizes(RecurrentConfig(**sizes | change))


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            "mamba",
            {
                "state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
            },
            "ArraysCache",
        ),
        (
            "gpt2",
            {
                "n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "layer_norm_epsilon": 1e-5,
                "num_key_value_heads": 4,
            },
            "no token embedding",
        ),
        (
            "ministral3",
            {
                "rope_parameters": {
                    "rope_theta": 1e4, "type": "default", "original_max_position_embeddings": 64,
                    "llama_4_scaling_beta": 0.1,
                },
            },
            "does not take a KV cache",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_verify_trees(module, options, message):
    """Recurrent state, learned positions, attention scaled by the length of the text: refused, with the reason."""
    found = importlib.import_module(f"mlx_lm.models.{module}")
    model = found.Model(found.ModelArgs.from_dict(COMMON | {"model_type": module} | options))
    mx.eval(model.parameters())
    with pytest.raises(UnsupportedTarget, match=message):
        api.wrap(model)


def test_a_model_is_handed_back_as_it_came():
    model = make_model(fresh=True)
    kinds = [type(m) for _, m in model.named_modules()]
    made = api.wrap(model, byte_tokenizer(), drafter="ngram")
    assert isinstance(made.target.tokenizer, TokenizerWrapper)
    made.target.record((0, 1, -1))
    assert [type(m) for _, m in model.named_modules()] != kinds
    made.close()
    assert [type(m) for _, m in model.named_modules()] == kinds


def test_hidden_states_are_those_of_transformers():
    """0 is the embedding, i what comes out of layer i, the last one after the final norm."""
    model = make_model(fresh=True)
    target = Target(model)
    target.record((0, 1, 2, -1))
    tokens = mx.array([[3, 1, 4]])
    _, hidden = target.run(tokens, target.make_cache(), None)
    embedded, first, last, again = mx.split(hidden, 4, axis=-1)
    assert mx.allclose(embedded, model.model.embed_tokens(tokens))
    assert mx.allclose(model.lm_head(last), model(tokens), atol=1e-5)
    assert mx.array_equal(last, again)
    assert not mx.allclose(first, embedded)
    target.release()


def test_one_synchronisation_for_each_step(target, monkeypatch):
    """Between two steps the host waits for the device once: all other results are read without waiting."""
    waits = []
    true = mx.eval
    monkeypatch.setattr(decode.mx, "eval", lambda *x: waits.append(1) or true(*x))
    made = Engine(target, recurrent_drafter(target), SHAPE)
    done = made.generate(PROMPTS[1], max_new_tokens=12, temperature=1.0, seed=0)
    assert len(waits) == done.stats.steps + 1
