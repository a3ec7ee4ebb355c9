"""Where no token can be chosen: one line says why and where, in plain decoding as with drafts."""

import pytest
import torch

from redrafter import Engine, Grammar, RuleConfig, Shape
from redrafter.errors import ConfigError
from redrafter.targets import Target
from tests.helpers.bytes import byte_target
from tests.helpers.zoo import recurrent_drafter
from tests.runtime.test_guided import recorded

PROMPT = [70, 71, 72, 73]
NOTHING = -torch.inf


@pytest.fixture(scope="module")
def target() -> Target:
    return byte_target()


@pytest.fixture(scope="module")
def engine(target) -> Engine:
    return Engine(target, recurrent_drafter(target), shape=Shape(width=3, length=3))


def refusal(engine: Engine, **options) -> str:
    """The same line from plain decoding and with drafts; the engine then writes what it wrote before."""
    before = engine.generate(PROMPT, max_new_tokens=6).tokens
    lines = []
    for kind in (engine, engine.plain()):
        with pytest.raises(ConfigError) as error:
            kind.generate(PROMPT, **({"max_new_tokens": 8} | options))
        lines.append(str(error.value))
    assert lines[0] == lines[1]
    assert "\n" not in lines[0]
    assert engine.generate(PROMPT, max_new_tokens=6).tokens == before
    return lines[0]


class Fill:
    """All scores become `value` where the text has `count` tokens; a trial's ids are longer."""

    def __init__(self, value: float, count: int) -> None:
        self.value, self.size = value, len(PROMPT) + count

    def __call__(self, ids, scores):
        return torch.full_like(scores, self.value) if ids.shape[1] == self.size else scores


class Unchanged:
    def __call__(self, ids, scores):
        return scores


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_is_named_with_the_place(engine, count, temperature):
    for value, problem in ((torch.nan, "returns NaN"), (NOTHING, "leaves no token to choose")):
        processors = [Unchanged(), Fill(value, count), Unchanged()]
        line = refusal(engine, logits_processor=processors, temperature=temperature, seed=1)
        assert line == f"the logits processor Fill {problem} at token {count + 1} of the text"


def test_the_last_token_of_a_text_counts(engine):
    line = refusal(engine, logits_processor=[Fill(torch.nan, 3)], max_new_tokens=4)
    assert line == "the logits processor Fill returns NaN at token 4 of the text"
    engine.generate(PROMPT, logits_processor=[Fill(torch.nan, 3)], max_new_tokens=3)


def test_only_the_text_counts_not_what_was_guessed(engine):
    text = PROMPT + engine.plain().generate(PROMPT, max_new_tokens=12).tokens
    guesses = []

    class Elsewhere:
        """NaN after every guess that is not the text's."""

        def __call__(self, ids, scores):
            ids = ids[0].tolist()
            if ids[: len(PROMPT)] != text[: len(PROMPT)] or ids == text[: len(ids)]:
                return scores
            guesses.append(ids)
            return torch.full_like(scores, torch.nan)

    assert PROMPT + engine.generate(PROMPT, max_new_tokens=12, logits_processor=[Elsewhere()]).tokens == text
    assert guesses


@pytest.mark.parametrize("rule", ["seeded", "rejection"])
def test_a_bias_that_forbids_everything(target, rule):
    width = 3 if rule == "seeded" else 1
    engine = Engine(target, recurrent_drafter(target), shape=Shape(width=width, length=3), rule=RuleConfig(name=rule))
    for temperature in (0.0, 1.0):
        nothing = dict.fromkeys(range(target.vocab_size), NOTHING)
        line = refusal(engine, logit_bias=nothing, temperature=temperature)
        assert line == "logit_bias leaves no token to choose at token 1 of the text"


def test_a_grammar_whose_end_is_biased_away(engine, target):
    options = {"grammar": Grammar.regex("[qQ]{3}"), "logit_bias": dict.fromkeys(engine.eos_tokens(), NOTHING)}
    for temperature in (0.0, 1.0):
        line = refusal(engine, **options, temperature=temperature, seed=2)
        assert line == "the grammar and logit_bias leave no token to choose at token 4 of the text"
    engine.generate(PROMPT, **options, max_new_tokens=3)
    with pytest.raises(ConfigError, match="no token to choose at token 4 of the text"):
        recorded(target).generate(PROMPT, **options, max_new_tokens=8)


def test_a_grammar_whose_tokens_are_biased_away(engine, target):
    bias = dict.fromkeys((target.tokenizer("q").input_ids + target.tokenizer("Q").input_ids), NOTHING)
    line = refusal(engine, grammar=Grammar.regex("a[qQ]{3}"), logit_bias=bias)
    assert line == "the grammar and logit_bias leave no token to choose at token 2 of the text"


@pytest.mark.parametrize("token", ["end", "q"])
def test_a_processor_and_a_grammar_that_share_no_token(engine, target, token):
    """The first token, here the end, is chosen nevertheless. The grammar allows it in one of the cases."""
    forbidden = engine.eos_tokens()[0] if token == "end" else target.tokenizer("q").input_ids[0]

    class Forbids:
        def __call__(self, ids, scores):
            return scores.masked_fill(torch.arange(scores.shape[1]) == forbidden, NOTHING)

    line = refusal(engine, grammar=Grammar.regex("qqq"), logits_processor=[Forbids()])
    at = 4 if token == "end" else 1
    assert line == f"the grammar and a logits processor leave no token to choose at token {at} of the text"


class List:
    def __call__(self, ids, scores):
        return [0.0]


class Transposed:
    def __call__(self, ids, scores):
        return scores.T


class Always:
    def __call__(self, ids, scores):
        return scores * torch.nan


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (Always(), "Always cannot be used: it returns NaN"),
        (List(), "List must return scores of shape .*, got list"),
        (Transposed(), "Transposed must return scores of shape .*, got "),
        (Always, "is called with"),
        (5, "is called with .*5"),
    ],
    ids=range(5),
)
def test_what_is_no_processor(engine, processor, reason):
    with pytest.raises(ConfigError, match=reason):
        engine.generate(PROMPT, logits_processor=[processor])
