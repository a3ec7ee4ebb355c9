"""Texts with a grammar: they follow it, and they are those of plain decoding with the same grammar."""

import concurrent.futures
import copy
import json
import re
import sys
import time
from typing import Any

import jsonschema_rs
import pytest
import torch

from redrafter import Engine, Grammar, RuleConfig, Shape
from redrafter.drafters import NgramDrafter
from redrafter.engine.decode import decode
from redrafter.engine.exactness import Promise
from redrafter.engine.grammar import CompiledGrammar, make_matcher, tokenizer_json
from redrafter.errors import ConfigError
from redrafter.planning.steps import FixedSteps
from redrafter.runtime.batch import Batch
from redrafter.runtime.guide import Branches
from redrafter.targets import Target
from tests.helpers.bytes import byte_target
from tests.helpers.zoo import recurrent_drafter

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PATTERN = r"(name|age)=[a-c]{2,4}( and [0-9]+)?\."
CHOICES = ["yes", "yes, of course", "no"]
GRAMMARS = {
    "schema": Grammar.json_schema(PERSON),
    "regex": Grammar.regex(PATTERN),
    "choices": Grammar.choices(CHOICES),
    "lark": Grammar.lark('start: "[" item ("," item)* "]"\nitem: /[ab]{1,3}/'),
}


def follows(name: str, text: str) -> bool:
    if name == "schema":
        return jsonschema_rs.is_valid(PERSON, json.loads(text))
    if name == "choices":
        return text in CHOICES
    return re.fullmatch(PATTERN if name == "regex" else r"\[[ab]{1,3}(,[ab]{1,3})*\]", text) is not None


@pytest.fixture(scope="module")
def target() -> Target:
    return byte_target()


def made(target: Target, kind: str) -> Engine:
    if kind == "ngram":
        return Engine(target, NgramDrafter(), shape=Shape(width=1, length=5))
    return Engine(target, recurrent_drafter(target), shape=Shape(width=3, length=3))


@pytest.mark.parametrize(
    ("name", "kind"), [(name, "recurrent") for name in GRAMMARS] + [("schema", "ngram")], ids=lambda x: x
)
def test_texts_are_those_of_plain_decoding(target: Target, name: str, kind: str) -> None:
    engine, finished = made(target, kind), 0
    for sampling in ({}, {"temperature": 1.0, "seed": [3, 4, 5], "top_p": 0.95}):
        options: dict[str, Any] = {"max_new_tokens": 60, "grammar": GRAMMARS[name], **sampling}
        prompts = ["name", "tags: [x", "12"]
        fast, slow = engine.generate(prompts, batch_size=2, **options), engine.plain().generate(prompts, **options)
        assert [c.tokens for c in fast] == [c.tokens for c in slow]
        for done in fast:
            if done.finish_reason == "stop":
                finished += 1
                assert follows(name, done.text), done.text
    assert finished >= 3


def test_rows_with_and_without_a_grammar_share_steps_also_where_steps_are_recorded(target: Target) -> None:
    engine = made(target, "recurrent")
    options = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5}
    requests = [
        engine.requests([prompt], grammar=grammar, **options)[0]
        for prompt, grammar in (("name", PERSON), ("name", None), ("yes", GRAMMARS["choices"]))
    ]
    alone = [engine.plain().complete([request])[0].tokens for request in requests]
    assert [c.tokens for c in engine.complete(requests)] == alone
    batch = Batch(target, engine.drafter, rows=3, context=128, shapes=[engine.shape], recorded=True)
    texts: dict[int, list[int]] = {}
    for parts in decode(batch, requests, RuleConfig(), (), 3, Promise("ties"), FixedSteps(engine.shape)):
        for part in parts:
            texts.setdefault(part.row, []).extend(part.tokens)
    assert [texts[i] for i in range(3)] == alone


@pytest.mark.parametrize("rule", [RuleConfig(name="rejection"), RuleConfig(name="typical")], ids=lambda r: r.name)
def test_every_rule_keeps_to_the_grammar(target: Target, rule: RuleConfig) -> None:
    engine = Engine(target, recurrent_drafter(target), shape=Shape(width=3, length=3), rule=rule)
    done = engine.generate(["a"] * 4, grammar=GRAMMARS["regex"], temperature=1.0, seed=[1, 2, 3, 4], max_new_tokens=60)
    ended = [c.text for c in done if c.finish_reason == "stop"]
    assert ended
    assert all(follows("regex", text) for text in ended)


def test_a_users_processor_comes_before_the_grammar(target: Target) -> None:
    class Favour:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + 100 * (torch.arange(scores.shape[1]) == no)

    (no,) = target.tokenizer("n").input_ids
    engine = made(target, "ngram")
    assert engine.generate("a", grammar=GRAMMARS["choices"], logits_processor=[Favour()]).text == "no"


def guide(target: Target, grammar: Grammar, text: str = "") -> Any:
    """The guide of a row that has written this text after an empty prompt."""
    ids: list[int] = []
    compiled: CompiledGrammar = Engine(target, NgramDrafter()).grammars.compiled(grammar)
    made = compiled.guide(lambda: ids)
    ids += target.tokenizer(text).input_ids
    return made


def test_forbidden_guesses_are_dropped_and_forced_tokens_planted(target: Target) -> None:
    tokenizer = target.tokenizer
    root, bad, good = 5, *(tokenizer(x).input_ids[0] for x in "Qx")
    made = guide(target, Grammar.regex("x{3}name[ab]"))
    drafted = Branches([root, bad, good, bad, good], [0, 0, 0, 1, 2])
    tree = made.guess(drafted, room=9)
    assert (tree.tokens[0], tree.parents[0]) == (root, 0)
    assert tokenizer.decode(tree.tokens[1:]) == "xxxname"
    assert tree.parents == [0, *range(len(tree.tokens) - 1)], "a chain"
    assert bad not in tree.tokens
    for room in range(2, 9):
        small = made.guess(drafted, room)
        assert len(small.tokens) - 1 == min(room, len(tree.tokens) - 1)
        assert small.tokens == tree.tokens[: len(small.tokens)]
    free = guide(target, Grammar.regex("[xQ]{3}"))
    assert free.guess(drafted, room=9) == drafted


def test_below_a_guess_forced_tokens_take_the_places_of_dropped_guesses_only(target: Target) -> None:
    """A guess may be wrong, and each node costs time."""
    bad, good = (target.tokenizer(x).input_ids[0] for x in "Qx")
    made = guide(target, Grammar.regex("[xy]{1}zzzz[ab]"))
    assert made.guess(Branches([5, good], [0, 0]), room=9) == Branches([5, good], [0, 0])
    three = made.guess(Branches([5, good, bad, bad], [0, 0, 0, 2]), room=9)
    assert target.tokenizer.decode(three.tokens[1:]) == "xzz"


def test_the_end_needs_no_guess(target: Target) -> None:
    made = guide(target, Grammar.choices(["yes"]), "yes")
    assert made.guess(Branches([5, 0, 7], [0, 0, 0]), room=9) == Branches([5], [0])


def test_forced_tokens_save_steps(target: Target) -> None:
    done = made(target, "ngram").generate("a", grammar=PERSON, max_new_tokens=60)
    assert done.stats.tokens_per_step > 1.5


EXPLODING = {
    "enum": {"enum": [f"{i:09}" for i in range(40_000)]},
    "patterns": {"allOf": [{"type": "string", "pattern": f".*{c}.{{30}}.*"} for c in "abcdefgh"]},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5_000)}},
    "endless": {"$ref": "#"},
    "unknown": {"type": "robot"},
    "multiple": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 9_999_991}}},
    "decimal multiple": {"type": "number", "multipleOf": 99.9983},
    "multiples together": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103)]},
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "grammar",
    [
        *(
            pytest.param(lambda schema=schema: Grammar.json_schema(schema), id=name)
            for name, schema in EXPLODING.items()
        ),
        pytest.param(lambda: Grammar.json_schema(nested(300)), id="nested"),
        pytest.param(lambda: Grammar.json_schema(nested(20_000)), id="nested beyond Python"),
        pytest.param(lambda: Grammar.regex("(" * 5000 + "a" + ")" * 5000), id="brackets"),
        pytest.param(lambda: Grammar.regex("(a"), id="no regex"),
        pytest.param(lambda: Grammar.regex("a{9999}{9999}{9999}{9999}"), id="repeated"),
        pytest.param(lambda: Grammar.lark("start: nothing"), id="no rule"),
        pytest.param(lambda: Grammar.lark('start: %json {"multipleO\\u0066" : 999983}'), id="multiple in Lark"),
        pytest.param(lambda: Grammar.choices([]), id="no choice"),
        pytest.param(lambda: Grammar.choices(["a" * 2**19]), id="long choice"),
        pytest.param(lambda: Grammar.of("{}"), id="text"),
    ],
)
def test_what_cannot_be_compiled_is_refused_soon(target: Target, grammar: Any) -> None:
    engine = made(target, "ngram")
    engine.requests(["a"], grammar=GRAMMARS["choices"])  # reads the tokenizer
    began = time.thread_time()
    with pytest.raises(ConfigError) as caught:
        engine.requests(["a"], grammar=grammar())
    assert time.thread_time() - began < 4, "0.4 s at most; what is not refused takes 10 s and more"
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_small_multiples_are_taken_and_grammars_are_compiled_one_at_a_time(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = made(target, "ngram").grammars
    running, most = [], []
    real = make_matcher

    def watched(*given: Any) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        found = real(*given)
        running.pop()
        return found

    monkeypatch.setattr("redrafter.engine.grammar.make_matcher", watched)
    schemas = [{"type": "number", "multipleOf": n} for n in (5, 0.01, 1000, 1e6, 250)]
    with concurrent.futures.ThreadPoolExecutor(5) as threads:
        list(threads.map(lambda s: grammars.compiled(Grammar.json_schema(s)), schemas))
    assert most == [1] * 5


def test_a_grammar_that_slows_steps_ends_its_own_text_only(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(target, "recurrent")
    slow, other = engine.requests(["a"], grammar=PERSON)[0], engine.requests(["a"], max_new_tokens=5)[0]
    monkeypatch.setattr("redrafter.engine.grammar.ALLOWANCE", -1.0)
    with pytest.raises(ConfigError, match="make it smaller"):
        engine.complete([slow])
    assert len(engine.complete([other])[0].tokens) == 5


def test_a_slow_grammar_loses_its_guesses_first(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(target, "recurrent")
    (request,) = engine.requests(["name"], grammar=PERSON, max_new_tokens=30)
    (usual,) = engine.complete([request])
    monkeypatch.setattr("redrafter.engine.grammar.SLOW", 0.0)
    (slow,) = engine.complete([request])
    assert slow.tokens == usual.tokens
    assert slow.stats.nodes == 0 < usual.stats.nodes


def test_a_guess_that_the_matcher_fails_at_does_not_end_the_text(target: Target) -> None:
    made = guide(target, Grammar.regex("x{3}name[ab]"), "x")
    drafted = Branches([5, target.tokenizer("x").input_ids[0]], [0, 0])

    class Fails:
        """A matcher that fails at the first guess."""

        def __init__(self, matcher: Any) -> None:
            self.matcher, self.failed = matcher, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

        def try_consume_tokens(self, tokens: list[int]) -> bool:
            self.failed = True
            return False

        def is_error(self) -> bool:
            return self.failed

    made.check()  # takes in the text so far
    made.matcher = Fails(made.matcher)
    assert made.guess(drafted, room=9) == Branches([5], [0])
    assert target.tokenizer.decode(made.guess(drafted, room=9).tokens[1:]) == "xxname", "and it guesses again"


def test_what_a_grammar_needs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(target, "ngram")
    with pytest.raises(ConfigError, match="leave ignore_eos out"):
        engine.generate("a", grammar=PERSON, ignore_eos=True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install llguidance"):
        engine.generate("a", grammar=PERSON)


def test_a_byte_level_tokenizer_with_several_decoders(target: Target) -> None:
    """As transformers 5.17 converts the tokenizer of a GGUF file."""
    from llguidance import LLTokenizer
    from tokenizers import decoders

    tokenizer = copy.deepcopy(target.tokenizer)
    several = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " "), decoders.ByteLevel()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(several)
    ids = tokenizer.encode("a b", add_special_tokens=False)
    assert LLTokenizer(tokenizer_json(tokenizer)).decode_bytes(ids) == b"a b"
    assert LLTokenizer(tokenizer.backend_tokenizer.to_str()).decode_bytes(ids) != b"a b", "the twin"


def test_a_tokenizer_that_the_library_misreads_is_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raw:
        """Takes the names of byte-level tokens for their bytes."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        @staticmethod
        def decode_bytes(ids: list[int]) -> bytes:
            return "".join(target.tokenizer.convert_ids_to_tokens(ids)).encode()

    monkeypatch.setattr("llguidance.LLTokenizer", Raw)
    with pytest.raises(ConfigError, match="llguidance reads"):
        made(target, "ngram").generate("a", grammar=PERSON)
