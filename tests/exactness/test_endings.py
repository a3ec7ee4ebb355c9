"""Where texts end: inside accepted paths, at the budget, at the end of the context."""

import pytest
import tokenizers
import transformers

from redrafter import Engine, Shape
from redrafter.drafters import NoDrafter
from redrafter.engine.request import Request
from redrafter.errors import PromptTooLong
from redrafter.targets import Target, load_target
from tests.helpers.zoo import PROMPTS, VOCAB, OracleDrafter, make_model, recurrent_drafter

SHAPE = Shape(width=3, length=4)


@pytest.fixture(scope="module")
def letters() -> transformers.PreTrainedTokenizerFast:
    """Token i is the i-th character of an alphabet, so that texts can be read."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[:VOCAB]
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="a")
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    raw.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)


@pytest.fixture(scope="module")
def target(letters) -> Target:
    return load_target(make_model(), tokenizer=letters)


def knowing(target: Target, n: int = 24, skill: float = 1.0) -> tuple[Engine, list[list[int]]]:
    """An engine whose drafter knows the plain texts, and those texts."""
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=n)]
    return Engine(target, OracleDrafter(PROMPTS, plain, skill), shape=SHAPE), plain


@pytest.mark.parametrize("place", range(11))
def test_eos_at_every_position_of_a_path(target, place):
    engine, plain = knowing(target)
    for row, text in enumerate(plain):
        eos = text[place]
        expected = text[: text.index(eos) + 1]
        requests = [
            Request(prompt=p, max_new_tokens=24, seed=0, eos=(eos,) if r == row else ()) for r, p in enumerate(PROMPTS)
        ]
        done = engine.complete(requests)
        assert done[row].tokens == expected
        assert done[row].finish_reason == "stop"
        others = [c.tokens for r, c in enumerate(done) if r != row]
        assert others == [t for r, t in enumerate(plain) if r != row], "an ending row must not disturb the others"


def test_several_eos_ids_and_ignore_eos(target):
    engine, plain = knowing(target)
    eos = (plain[0][9], plain[0][4])
    [done] = engine.complete([Request(prompt=PROMPTS[0], max_new_tokens=24, seed=0, eos=eos)])
    assert done.tokens == plain[0][: min(plain[0].index(e) for e in eos) + 1]
    model = target.model
    model.generation_config.eos_token_id = plain[0][4]
    try:
        assert engine.generate(PROMPTS[0], max_new_tokens=24).tokens == plain[0][: plain[0].index(plain[0][4]) + 1]
        assert engine.generate(PROMPTS[0], max_new_tokens=24, ignore_eos=True).tokens == plain[0]
    finally:
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize("budget", range(1, 12))
def test_max_new_tokens_is_exact(target, budget):
    engine, plain = knowing(target)
    done = engine.generate(PROMPTS, max_new_tokens=budget)
    assert [c.tokens for c in done] == [t[:budget] for t in plain]
    assert {c.finish_reason for c in done} == {"length"}


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("size", [1, 2, 5])
def test_stop_string_inside_a_path(target, letters, start, size):
    engine, plain = knowing(target)
    for row, text in enumerate(plain):
        whole = letters.decode(text)
        stop = whole[start : start + size]
        at = whole.index(stop)
        done = engine.generate(PROMPTS[row], max_new_tokens=24, stop=["never here!", stop])
        assert done.text == whole[:at]
        assert done.tokens == text[: at + size]
        assert done.finish_reason == "stop"


def test_stream_gives_the_same_text_and_never_a_stop_string(target, letters):
    engine, plain = knowing(target, skill=0.6)
    stop = letters.decode(plain[2])[9:12]
    parts = list(engine.stream(PROMPTS, max_new_tokens=24, stop=stop))
    for row in range(len(PROMPTS)):
        text = "".join(p.text for p in parts if p.row == row)
        assert text == engine.generate(PROMPTS[row], max_new_tokens=24, stop=stop).text
        assert stop not in text
        assert [p.finish_reason for p in parts if p.row == row][-1] is not None
    assert all(p.finish_reason is None or p is [q for q in parts if q.row == p.row][-1] for p in parts), (
        "nothing after the end"
    )


def test_context_exactly_full():
    """GPT-2 has a table of positions: one past its end would be an error, not a wrong number."""
    model = make_model("gpt2")
    target = load_target(model)
    for prompt in ([5] * 95, [5] * 90, PROMPTS[0]):
        plain = Engine(target, NoDrafter()).generate(prompt, max_new_tokens=500)
        assert len(prompt) + len(plain.tokens) == 96
        assert plain.finish_reason == "length"
        for shape in (Shape(width=1, length=1), Shape(width=3, length=4), Shape(width=8, length=4)):
            engine = Engine(target, OracleDrafter([prompt], [plain.tokens], 1.0), shape=shape)
            assert engine.generate(prompt, max_new_tokens=500).tokens == plain.tokens
            engine = Engine(target, recurrent_drafter(target), shape=shape)
            assert engine.generate(prompt, max_new_tokens=500).tokens == plain.tokens
    with pytest.raises(PromptTooLong, match="96 tokens"):
        Engine(target, NoDrafter()).generate([5] * 96, max_new_tokens=1)


def test_one_row_full_while_others_go_on():
    target = load_target(make_model("gpt2"))
    prompts = [[5] * 93, PROMPTS[2], [9]]
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(prompts, max_new_tokens=30)]
    assert [len(t) for t in plain] == [3, 30, 30]
    engine = Engine(target, OracleDrafter(prompts, plain, 0.7), shape=SHAPE)
    assert [c.tokens for c in engine.generate(prompts, max_new_tokens=30)] == plain


def test_user_stopping_criterion_is_asked_after_each_token(target):
    engine, plain = knowing(target)
    asked = []

    def halts(ids):
        asked.append(len(ids))
        return len(ids) == len(PROMPTS[0]) + 7

    [done] = engine.complete([Request(prompt=PROMPTS[0], max_new_tokens=24, seed=0, halts=halts)])
    assert done.tokens == plain[0][:7]
    assert asked == list(range(len(PROMPTS[0]) + 1, len(PROMPTS[0]) + 8))
