"""transformers' own generate, with our decoding method."""

import functools
import sys
import threading

import pytest
import torch
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    dynamic_module_utils,
)
from transformers.generation.logits_process import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TypicalLogitsWarper,
)

from redrafter import CUSTOM_GENERATE_FOLDER, Shape, custom_generate
from redrafter.config import SamplingParams
from redrafter.engine.transformers import WARPERS, translate
from redrafter.errors import ConfigError
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter

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


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory):
    """transformers copies a function's file into a cache in the user's home: here into a folder of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])  # transformers adds the cache
        yield


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
        {"sequence_bias": [[[3], 2.0], [[1], -3.0]], "repetition_penalty": 1.5},
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


@pytest.mark.parametrize(
    "lengths",
    [
        {"min_new_tokens": 9},
        {"min_length": 20},
        {"forced_eos_token_id": 1},
        {"exponential_decay_length_penalty": (4, 1.4)},
    ],
    ids=str,
)
def test_lengths_are_counted_in_padded_width_as_theirs(model, ours, lengths):
    free = model.generate(**padded(), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    eos = int(free[0, padded()["inputs"].shape[1] + 3])
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": eos}
    expected = model.generate(**padded(), **options, **lengths)
    assert not torch.equal(expected, model.generate(**padded(), **options)), "the option must matter"
    assert torch.equal(model.generate(**padded(), **options, **lengths, **ours), expected)


def test_a_criterion_on_the_width_is_theirs(model, ours):
    class Width(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 20)

    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "stopping_criteria": [Width()]}
    expected = model.generate(**padded(), **options)
    assert expected.shape[1] == 20
    assert torch.equal(model.generate(**padded(), **options, **ours), expected)


class CountsCalls(StoppingCriteria):
    """Ends a row by its number of calls and its token: a state that only a call per position and batch keeps right."""

    def __init__(self, limit: int) -> None:
        self.limit, self.calls, self.shapes = limit, 0, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        self.shapes.append(tuple(input_ids.shape))
        last = input_ids[:, -1] % 4 == self.calls % 4
        return last | torch.tensor(self.calls >= self.limit)


@pytest.mark.parametrize("ends", [False, True], ids=["without eos", "with eos"])
@pytest.mark.parametrize("limit", [1, 6, 99])
def test_a_stateful_criterion_is_called_as_theirs(model, ours, ends, limit):
    free = model.generate(**padded(), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    if ends:  # only then does transformers fill up rows that have ended
        options["eos_token_id"] = int(free[0, padded()["inputs"].shape[1] + 3])
    theirs, mine = CountsCalls(limit), CountsCalls(limit)
    expected = model.generate(**padded(), **options, stopping_criteria=[theirs])
    assert not torch.equal(expected, model.generate(**padded(), **options)), "the criterion must matter"
    assert torch.equal(model.generate(**padded(), **options, stopping_criteria=[mine], **ours), expected)
    assert mine.shapes == theirs.shapes


@pytest.mark.parametrize(
    "options",
    [{"encoder_no_repeat_ngram_size": 1}, {"encoder_repetition_penalty": 1.8}, {"encoder_repetition_penalty": 0.4}],
    ids=str,
)
@pytest.mark.parametrize("copies", [1, 2])
def test_prompt_processors_work_in_a_batch(model, ours, options, copies):
    options |= {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    expected = model.generate(**padded(), **options)
    plain = model.generate(**padded(), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    assert not torch.equal(expected, plain), "the option must matter"
    if copies == 1:
        assert torch.equal(model.generate(**padded(), **options, **ours), expected)
    else:  # several rows per prompt
        options |= {"do_sample": True, "top_k": 1, "num_return_sequences": copies}
        got = model.generate(**padded(), **options, **ours)
        assert torch.equal(got[::copies], expected)
        assert torch.equal(got[1::copies], expected)


def test_position_ids_that_say_nothing_new_are_fine(model, ours):
    options = padded() | {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    positions = options["attention_mask"].cumsum(-1) - 1
    expected = model.generate(**options)
    assert torch.equal(model.generate(**options, position_ids=positions.clamp(min=0), **ours), expected)
    with pytest.raises(ConfigError, match="position_ids cannot be used"):
        model.generate(**options, position_ids=positions.clamp(min=0) + 3, **ours)


@pytest.mark.parametrize("mask", [[1] * 6 + [0] * 2, [1, 1, 0, 0, 1, 1, 1, 1], [0] * 8], ids=["right", "holes", "none"])
def test_a_mask_that_is_not_left_padded_is_refused(model, ours, mask):
    options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    ids = torch.tensor([PROMPTS[0], PROMPTS[0]])
    with pytest.raises(ConfigError, match="attention_mask must be zeros and then ones"):
        model.generate(ids, attention_mask=torch.tensor([[1] * 8, mask]), **options, **ours)


WAYS = [("stream_to", {}), ("streamer", {"custom_generate": CUSTOM_GENERATE_FOLDER, "trust_remote_code": True})]
"""How a user may give a streamer."""


class Recorder:
    """A streamer that keeps what it was given."""

    def __init__(self) -> None:
        self.given, self.ends = [], 0

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize(("argument", "way"), WAYS, ids=["stream_to", "folder"])
def test_a_streamer_gets_what_theirs_gives(model, ours, argument, way):
    """The prompt, one tensor for each position of the batch, and the end; also with an end-of-text token."""
    free = model.generate(**padded(), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    eos = int(free[0, padded()["inputs"].shape[1] + 6])
    options = padded() | {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": eos}
    theirs, mine = Recorder(), Recorder()
    model.generate(**options, streamer=theirs)
    model.generate(**options, **{argument: mine}, **(ours | way))
    assert mine.given == theirs.given
    assert mine.ends == theirs.ends == 1


class Letters:
    """The least a streamer needs of a tokenizer."""

    def decode(self, ids, **options):
        return "".join(chr(97 + i % 26) + " " for i in ids)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("argument", "way"), WAYS, ids=["stream_to", "folder"])
def test_text_is_streamed_to_another_thread(model, ours, argument, way, fails):
    ids = torch.tensor([PROMPTS[0]])
    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, argument: streamer} | ours | way
    if fails:
        options["dola_layers"] = "low"

    def work():
        if fails:
            with pytest.raises(ConfigError):
                model.generate(ids, **options)
        else:
            model.generate(ids, **options)

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)  # a failure ends the stream too, or this would wait for ever
    thread.join()
    theirs = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    model.generate(ids, do_sample=False, max_new_tokens=NEW, pad_token_id=0, streamer=theirs)
    assert text == ("" if fails else "".join(theirs))


def test_a_model_whose_own_folder_holds_the_function(model, ours):
    """transformers then replaces `model.generate` by our function, which must not call itself."""
    options = padded() | {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    expected = model.generate(**options)
    function = model.load_custom_generate(CUSTOM_GENERATE_FOLDER, trust_remote_code=True)
    model.generate = functools.partial(function, model=model)
    try:
        found = model.generate(**options, **{k: v for k, v in ours.items() if k != "custom_generate"})
    finally:
        del model.generate
    assert found.tolist() == expected.tolist()


def test_tokens_are_streamed_as_they_are_decided(model, ours):
    class Impatient(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.given) == 5:
                raise KeyboardInterrupt

    streamer = Impatient()
    with pytest.raises(KeyboardInterrupt):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=80, pad_token_id=0, stream_to=streamer, **ours)
    assert streamer.ends == 1
    assert len(streamer.given) == 5


def test_translation_keeps_their_order():
    t, k, p, m = (w(x) for w, x in zip(WARPERS, (0.7, 5, 0.9, 0.1), strict=True))
    penalty, bias = RepetitionPenaltyLogitsProcessor(1.2), SequenceBiasLogitsProcessor([[[1], 2.0]])
    typical = TypicalLogitsWarper(0.5)
    assert translate([penalty, bias, t, k, p, m], True) == (
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
        [bias],
    )
    assert translate([t, p], True) == (SamplingParams(temperature=0.7, top_p=0.9), [])
    assert translate([bias, penalty, t], True) == (SamplingParams(temperature=0.7), [bias, penalty])
    hot = SamplingParams(temperature=1.0)
    assert translate([t, typical], True) == (hot, [t, typical]), "theirs comes after temperature"
    assert translate([p, k], True) == (hot, [p, k]), "not their order"
    assert translate([t, t], True) == (hot, [t, t]), "twice"
    assert translate([t], False) == (SamplingParams(), [t]), "greedy stays greedy"
    assert translate([penalty], False, padded=True) == (SamplingParams(), [penalty]), "theirs counts the pads"


def test_training_mode_is_given_back(model, ours):
    model.train()
    try:
        model.generate(**padded(), do_sample=False, max_new_tokens=3, pad_token_id=0, **ours)
        assert model.training
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"dola_layers": "high"}, "dola_layers"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(model, ours, options, word):
    with pytest.raises(ConfigError, match=word):
        model.generate(**padded(), do_sample=False, max_new_tokens=4, pad_token_id=0, **options, **ours)


def test_a_quantized_cache_is_refused(model):
    """Asked for directly: `generate` itself needs a quantiser that is not installed here."""
    config = GenerationConfig(cache_implementation="quantized", max_new_tokens=4)
    with pytest.raises(ConfigError, match="cache_implementation='quantized'"):
        custom_generate(model, torch.tensor([PROMPTS[0]]), [], [], config)


def test_embeddings_are_refused(model, ours):
    embeds = model.get_input_embeddings()(torch.tensor([PROMPTS[0]]))
    with pytest.raises(ConfigError, match="inputs_embeds"):
        model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=4, pad_token_id=0, **ours)


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stream_to": 5}, "stream_to must be of type Streamer, got 5"),
        ({"seed": "5"}, "seed must be a whole number, got '5'"),
        ({"shape": 5}, "shape must be of type Shape or text, got 5"),
        ({"rule": "seeded"}, "rule must be of type RuleConfig, got 'seeded'"),
        ({"drafter": 5}, "a drafter is a name, a folder, a causal LM or a drafter object, not 5"),
    ],
    ids=["stream_to", "seed", "shape", "rule", "drafter"],
)
def test_wrong_arguments(model, ours, options, says):
    with pytest.raises(ConfigError) as error:
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2, **(ours | options))
    assert says in str(error.value)


def test_a_wrong_argument_ends_the_streamer(model, ours):
    """Or a thread that reads it would wait forever."""
    ended = threading.Event()

    class Sink:
        def put(self, value):
            pass

        def end(self):
            ended.set()

    with pytest.raises(ConfigError, match="seed"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2, **(ours | {"seed": "5", "stream_to": Sink()}))
    assert ended.is_set()


def test_ids_outside_the_vocabulary(model, ours):
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        model.generate(torch.tensor([[1, 10_000]]), max_new_tokens=2, **ours)
