"""Wrong arguments of the library: each is refused in one line that names the argument and what was given."""

import math

import numpy as np
import pytest
import torch

import redrafter
from redrafter import Engine, Gamma, Grammar, Shape
from redrafter.drafters import NgramDrafter
from redrafter.engine.request import Request
from redrafter.errors import ConfigError, RedrafterError
from redrafter.targets import Target, load_target
from tests.helpers.letters import make_target
from tests.helpers.zoo import VOCAB, make_model, recurrent_drafter

PROMPT = [1, 2, 3, 4]
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def engine(target) -> Engine:
    return Engine(target, recurrent_drafter(target), shape=Shape(width=2, length=2))


def refusal(call) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


OPTIONS = [
    ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number, got '5'"),
    ({"max_new_tokens": None}, "max_new_tokens must be a whole number, got None"),
    ({"max_new_tokens": 5.0}, "max_new_tokens must be a whole number, got 5.0"),
    ({"max_new_tokens": True}, "max_new_tokens must be a whole number, got True"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ({"max_new_tokens": 10**400}, "max_new_tokens must be at most"),
    ({"batch_size": "2"}, "batch_size must be a whole number, got '2'"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"batch_size": math.inf}, "batch_size must be a whole number, got inf"),
    ({"n": "2"}, "n must be a whole number, got '2'"),
    ({"n": True}, "n must be a whole number, got True"),
    ({"n": 10**9}, "n must be at most 1024, got 1000000000"),
    ({"stop": 5}, "stop must be text or a list, got 5"),
    ({"stop": None}, "stop must be text or a list, got None"),
    ({"stop": b"a"}, "stop must be text or a list, got b'a'"),
    ({"stop": ["a", 5]}, "stop[1] must be text, got 5"),
    ({"stop": "\ud800"}, "stop must be UTF-8 text"),
    ({"stop": [""]}, "a stop string is empty"),
    ({"ignore_eos": "no"}, "ignore_eos must be true or false, got 'no'"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ({"halts": 5}, "halts must be a function, got 5"),
    ({"shown": 5}, "shown must be a list, got 5"),
    ({"shown": ["a"]}, "shown[0] must be a whole number, got 'a'"),
    ({"seed": "5"}, "seed must be a whole number or a list, got '5'"),
    ({"seed": 1.5}, "seed must be a whole number or a list, got 1.5"),
    ({"seed": True}, "seed must be a whole number or a list, got True"),
    ({"seed": 2**64}, "seed must be at most"),
    ({"seed": ["5"]}, "seed[0] must be a whole number, got '5'"),
    ({"seed": torch.tensor([1]).to("meta")}, "holds no numbers that can be read"),
    ({"seed": torch.tensor(0.5)}, "seed must be a whole number or a list, got 0.5"),
    ({"temperature": None}, "temperature must be a number, got None"),
    ({"temperature": True}, "temperature must be a number, got True"),
    ({"temperature": math.nan}, "temperature must be a number, got nan"),
    ({"temperature": math.inf}, "temperature must be at most 1e+30, got inf"),
    ({"temperature": 1e-40}, "temperature must be 0 or at least 1e-30, got 1e-40"),
    ({"temperature": torch.tensor(1.0)}, "temperature must be a number, got tensor(1.)"),
    ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
    ({"top_p": "1"}, "top_p must be a number, got '1'"),
    ({"min_p": [0]}, "min_p must be a number, got [0]"),
    ({"repetition_penalty": 0}, "repetition_penalty must be at least 1e-30, got 0"),
    ({"presence_penalty": 1e39}, "presence_penalty must be at most 1e+30, got 1e+39"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty must be at least -1e+30, got -inf"),
    ({"logit_bias": [1]}, "logit_bias must be a mapping, got [1]"),
    ({"logit_bias": 5}, "logit_bias must be a mapping, got 5"),
    ({"logit_bias": None}, "logit_bias must be a mapping, got None"),
    ({"logit_bias": {1: None}}, "logit_bias[1] must be a number, got None"),
    ({"logit_bias": {1: math.inf}}, "logit_bias[1] must be at most 1e+30, got inf"),
    ({"logit_bias": {1: 1e39}}, "logit_bias[1] must be at most 1e+30, got 1e+39"),
    ({"logit_bias": {"1": 1}}, "logit_bias['1'] must be a whole number, got '1'"),
    ({"logit_bias": {True: 1}}, "logit_bias[True] must be a whole number, got True"),
    ({"logit_bias": {-1: 1}}, "logit_bias names token -1, outside the vocabulary"),
    ({"logits_processor": 5}, "logits_processor must be a list, got 5"),
    ({"logits_processor": len}, "logits_processor must be a list, got <built-in function len>"),
    ({"logits_processor": [5]}, "a logits processor is called with (ids, scores), not 5"),
    ({"grammar": "x"}, "grammar must be a Grammar or a JSON schema"),
    ({"grammar": {"a": object()}}, "the JSON schema is not JSON"),
    ({"streamer": 5}, "there is no option 'streamer'"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=[str(list(o)) + str(i) for i, (o, _) in enumerate(OPTIONS)])
def test_wrong_options(engine, options, says):
    assert says in refusal(lambda: engine.generate(PROMPT, **options))
    if "batch_size" not in options:
        assert says in refusal(lambda: list(engine.stream(PROMPT, **options)))


NOT_PROMPTS = [
    (b"abc", "not b'abc'"),
    (bytearray(b"abc"), "not bytearray(b'abc')"),
    ([b"abc"], "not b'abc'"),
    (5, "not 5"),
    (None, "not None"),
    (torch.tensor(5), "not tensor(5)"),
    ({1, 2}, "not {1, 2}"),
    (torch.tensor([1]).to("meta"), "holds no numbers that can be read"),
    (torch.eye(2).to_sparse(), "holds no numbers that can be read"),
    (len, "not <built-in function len>"),
    ([], "no prompt given"),
    ([[]], "the prompt is empty"),
    ("", "the prompt is empty"),
    ("\ud800", "prompt must be UTF-8 text"),
    ([True, False], "prompt[0] must be a whole number, got True"),
    ([1, 2.0], "prompt[1] must be a whole number, got 2.0"),
    ([0.5], "prompt[0] must be a whole number, got 0.5"),
    (torch.tensor([0.5]), "prompt[0] must be a whole number, got 0.5"),
    ([1, "2"], "prompt[1] must be a whole number, got '2'"),
    ([1, None], "prompt[1] must be a whole number, got None"),
    ([["1"]], "prompt[0] must be a whole number, got '1'"),
    ([[[1]]], "prompt[0] must be a whole number, got [1]"),
    (np.ones((1, 2, 2), dtype=int), "prompt[0] must be a whole number, got [1, 1]"),
    (["abc", 5], "not 5"),
    (["abc", None], "not None"),
    ([-1], "outside the vocabulary"),
    ([VOCAB], "outside the vocabulary"),
    ([10**30], "prompt[0] must be at most"),
    ([{}], "needs 'role' and 'content'"),
    ([{"role": "user"}], "needs 'role' and 'content'"),
    ([{"role": "user", "content": None}], "the content of a chat message must be text or a list, got None"),
    ([{"role": "user", "content": 5}], "the content of a chat message must be text or a list, got 5"),
    ([{"role": "user", "content": b"a"}], "the content of a chat message must be text or a list, got b'a'"),
    ([{"role": None, "content": "a"}], "the role of a chat message must be text, got None"),
    ([{"role": "user", "content": "a"}, "b"], "prompt[1] must be a mapping, got 'b'"),
    ({"input_ids": [1]}, "give the ids alone"),
]


@pytest.mark.parametrize(("prompt", "says"), NOT_PROMPTS, ids=range(len(NOT_PROMPTS)))
def test_what_is_no_prompt(engine, prompt, says):
    assert says in refusal(lambda: engine.generate(prompt, max_new_tokens=2))


def test_prompts_that_are_right(engine):
    """Every form of a prompt, beside each other; refusals before left no trace."""
    plain = engine.plain()
    for prompt in (PROMPT, tuple(PROMPT), torch.tensor(PROMPT), np.array(PROMPT), iter(PROMPT), range(1, 5)):
        assert engine.generate(prompt, max_new_tokens=4).tokens == plain.generate(PROMPT, max_new_tokens=4).tokens
    for prompt in ("abc", CHAT, [CHAT, "abc", PROMPT]):
        got, want = (kind.generate(prompt, max_new_tokens=4) for kind in (engine, plain))
        assert repr(got).count("text=") == repr(want).count("text=")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert engine.encode([call])
    assert engine.generate(PROMPT, seed=torch.tensor(3)).seed == 3
    assert engine.generate(PROMPT, seed=np.array([3]), max_new_tokens=1).seed == 3
    assert len(engine.generate([PROMPT] * 3, max_new_tokens=1, batch_size=np.int64(3))) == 3
    request = Request(prompt=PROMPT, max_new_tokens=1, seed=np.int64(3))
    assert engine.complete([request])[0].tokens == engine.generate(PROMPT, seed=3, max_new_tokens=1).tokens


def test_a_chat_template_that_fails():
    target = make_target(template="{{ raise_exception('roles must alternate') }}")
    says = refusal(lambda: Engine(target, NgramDrafter()).generate(CHAT))
    assert says == "llama cannot write this chat by its template: TemplateError: roles must alternate"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": "ab"}, "prompt must be a list, got 'ab'"),
        ({"prompt": [0.5]}, "prompt[0] must be a whole number, got 0.5"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [VOCAB]}, "outside the vocabulary"),
        ({"prompt": [1] * 96}, "a context of 96"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be a whole number"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"sampling": {}}, "sampling must be of type SamplingParams, got {}"),
        ({"sampling": redrafter.SamplingParams(logit_bias={VOCAB: 1})}, "outside the vocabulary"),
        ({"eos": 5}, "eos must be a list, got 5"),
        ({"stop": "x"}, "stop must be a list, got 'x'"),
        ({"halts": "x"}, "halts must be a function, got 'x'"),
    ],
    ids=range(12),
)
def test_wrong_requests(engine, change, says):
    def run():
        return list(engine.run([Request(**({"prompt": PROMPT, "max_new_tokens": 2, "seed": 0} | change))]))

    with pytest.raises(RedrafterError) as error:
        run()
    assert says in str(error.value)


def test_what_is_no_list_of_requests(engine):
    assert refusal(lambda: engine.complete(5)) == "requests must be a list, got 5"
    assert refusal(lambda: engine.complete([5])) == "requests[0] must be of type Request, got 5"
    request = Request(prompt=PROMPT, max_new_tokens=1, seed=0)
    assert refusal(lambda: engine.complete([request], rows=0)) == "rows must be at least 1, got 0"
    assert refusal(lambda: engine.complete([request], 5)) == "processors must be a list, got 5"
    assert engine.complete([]) == []


LOADS = [
    ({"drafter": 5}, "a drafter is a name, a folder, a causal LM or a drafter object, not 5"),
    ({"drafter": b"ngram"}, "not b'ngram'"),
    ({"drafter": []}, "not []"),
    ({"drafter": np.array([1, 2])}, "not array([1, 2])"),
    ({"drafter": NgramDrafter}, "NgramDrafter is a class"),
    ({"shape": 5}, "shape must be of type Shape or text, got 5"),
    ({"shape": (3, 2)}, "shape must be of type Shape or text, got (3, 2)"),
    ({"shape": "3xx2"}, "a shape is written WxL or WxL:N"),
    ({"rule": "typical"}, "rule must be of type RuleConfig, got 'typical'"),
    ({"gamma": 5}, "gamma must be of type Gamma or text, got 5"),
    ({"runtime": "fast"}, "runtime must be one of auto, compiled, graphs, eager, got 'fast'"),
    ({"runtime": None}, "runtime must be one of auto, compiled, graphs, eager, got None"),
    ({"exact": True}, "exact must be one of auto, require, got True"),
    ({"tokenizer": 5}, "tokenizer must be a tokenizer of transformers, got 5"),
    ({"dtype": 16}, "dtype must be text or of type dtype, got 16"),
    ({"device": 0}, "device must be text, got 0"),
    ({"threads": "2"}, "threads must be a whole number, got '2'"),
    ({"threads": True}, "threads must be a whole number, got True"),
    ({"kv_dtype": None}, "kv_dtype must be one of fp32, fp16, int8, got None"),
    ({"activations": 8}, "activations must be one of int16, int8, fp32, got 8"),
    ({"model": 5}, "a model is a name, a folder, a GGUF file or a causal LM of transformers, not 5"),
    ({"model": torch.nn.Linear(1, 1)}, "not Linear("),
    ({"model": b"x"}, "not b'x'"),
    ({"model": "a" * 5000}, "model is no path that can be read (File name too long), got 'aaa"),
    ({"drafter": "a" * 5000}, "drafter is no path that can be read (File name too long), got 'aaa"),
    ({"model": "a\0b"}, "model is no path that can be read (embedded null byte)"),
]


@pytest.mark.parametrize(("options", "says"), LOADS, ids=[str(list(o))[:40] + str(i) for i, (o, _) in enumerate(LOADS)])
def test_wrong_arguments_of_load(options, says):
    assert says in refusal(lambda: redrafter.load(**{"model": make_model(), "drafter": "ngram"} | options))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"dtype": "fp32", "kv_dtype": "int8"}, "kv_dtype int8 is for packed weights on a CPU"),
        ({"dtype": torch.float32, "activations": "int8"}, "activations int8 is for packed weights on a CPU"),
        ({"revision": "main", "kv_dtype": "fp16"}, "kv_dtype fp16 is for packed weights on a CPU"),
        ({"model": "no model is looked for", "kv_dtype": "fp16"}, "kv_dtype fp16 is for packed weights on a CPU"),
    ],
    ids=range(4),
)
def test_what_only_packed_weights_have_is_refused_before_a_model_is_loaded(how, says, monkeypatch):
    monkeypatch.setattr("redrafter.engine.engine.load_target", lambda *_, **__: pytest.fail("a model is loaded"))
    assert says in refusal(lambda: redrafter.load(**how))


def test_wrong_arguments_of_an_engine(target):
    drafter = NgramDrafter()
    for call, says in (
        (lambda: Engine(5, drafter), "target must be of type Target, got 5"),
        (lambda: Engine(make_model(), drafter), "target must be of type Target, got LlamaForCausalLM("),
        (lambda: Engine(target, 5), "not 5"),
        (lambda: Engine(target, None), "not None"),
        (lambda: Engine(target, drafter, shape=5), "shape must be of type Shape or text, got 5"),
        (lambda: Engine(target, drafter, adapts="no"), "adapts must be true or false, got 'no'"),
        (lambda: Engine(target, drafter, rule={}), "rule must be of type RuleConfig, got {}"),
        (lambda: Engine(target, drafter, exact="yes"), "exact must be one of auto, require, got 'yes'"),
        (lambda: NgramDrafter("4"), "longest must be a whole number, got '4'"),
        (lambda: load_target(make_model(), tokenizer="x"), "tokenizer must be a tokenizer of transformers, got 'x'"),
    ):
        assert says in refusal(call)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.regex(5), "grammar must be text, got 5"),
        (lambda: Grammar.lark(None), "grammar must be text, got None"),
        (lambda: Grammar.choices(5), "choices must be a list, got 5"),
        (lambda: Grammar.choices("yes"), "choices must be a list, got 'yes'"),
        (lambda: Grammar.choices([]), "choices must be one or more texts"),
        (lambda: Grammar.choices(["a", ""]), "none of them empty"),
        (lambda: Grammar.choices([5]), "choices[0] must be text, got 5"),
        (lambda: Grammar.json_schema(b"{}"), "the JSON schema is not JSON"),
        (lambda: Grammar.json_schema(5), "a JSON schema must be an object, got 5"),
        (lambda: Grammar("xml", "x"), "kind must be one of json_schema, regex, grammar, choice, got 'xml'"),
        (lambda: Gamma.of(5), "gamma must be text, got 5"),
    ],
    ids=range(11),
)
def test_wrong_settings(make, says):
    assert says in refusal(make)
