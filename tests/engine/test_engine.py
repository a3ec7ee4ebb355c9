"""The public face: options, choices, streams, processors."""

import pytest
import torch
from transformers.generation import logits_process as theirs

import redrafter
from redrafter import Engine, RuleConfig, SamplingParams, Shape
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.tree import pack_beam
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter
from redrafter.engine import decode
from redrafter.errors import ConfigError, DrafterMismatch, PromptTooLong
from redrafter.runtime.eager import EagerSteps
from redrafter.runtime.step_drafter import trimmed
from redrafter.targets import load_target
from tests.helpers.clock import Clock
from tests.helpers.zoo import PROMPTS, VOCAB, OracleDrafter, make_model, recurrent_drafter


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


@pytest.fixture(scope="module")
def engine(target):
    return Engine(target, recurrent_drafter(target), shape=Shape(width=3, length=3))


def test_one_prompt_or_many(engine):
    one = engine.generate(PROMPTS[0], max_new_tokens=5)
    many = engine.generate([PROMPTS[0]], max_new_tokens=5)
    assert one.tokens == many[0].tokens
    tensor = engine.generate(torch.tensor(PROMPTS[0]), max_new_tokens=5)
    assert tensor.tokens == one.tokens


def test_seed_repeats_and_is_reported(engine):
    free = engine.generate(PROMPTS[0], max_new_tokens=12, temperature=1.0)
    again = engine.generate(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=free.seed)
    assert again.tokens == free.tokens
    other = engine.generate(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=free.seed + 1)
    assert other.tokens != free.tokens
    per_prompt = engine.generate([PROMPTS[0]] * 2, max_new_tokens=12, temperature=1.0, seed=[free.seed, free.seed + 1])
    assert [c.tokens for c in per_prompt] == [free.tokens, other.tokens]


def test_n_choices_differ_and_repeat(engine):
    choices = engine.generate(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=4, n=3)
    assert len({tuple(c.tokens) for c in choices}) == 3
    assert choices[0].tokens == engine.generate(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=4).tokens
    plain = engine.plain().generate(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=4, n=3)
    assert [c.tokens for c in plain] == [c.tokens for c in choices]


def test_batch_size_changes_nothing(engine):
    options = {"max_new_tokens": 10, "temperature": 1.0, "seed": 2}
    whole = [c.tokens for c in engine.generate(PROMPTS, **options)]
    assert [c.tokens for c in engine.generate(PROMPTS, batch_size=2, **options)] == whole


def test_finished_rows_are_dropped(target, monkeypatch):
    """Budgets of 2, 2, 2, 2 and 30: after the short rows end, the batch is one row."""
    sizes = []
    launch = EagerSteps.launch

    def counted(self, rows, *rest):
        sizes.append(len(rows))
        return launch(self, rows, *rest)

    monkeypatch.setattr(EagerSteps, "launch", counted)
    for drafter in (NoDrafter(), recurrent_drafter(target), NgramDrafter(2, 1), ModelDrafter(target, target)):
        engine = Engine(target, drafter, shape=Shape(width=2, length=2))
        budgets = [2, 2, 2, 2, 30]
        requests = [engine.requests([p], max_new_tokens=m, seed=0)[0] for p, m in zip(PROMPTS, budgets, strict=True)]
        sizes.clear()
        done = engine.complete(requests)
        assert sizes[0] == 5
        assert sizes[-1] == 1
        alone = [engine.complete([r])[0].tokens for r in requests]
        assert [c.tokens for c in done] == alone


def test_trimmed_drops_only_empty_columns():
    beam = torch.tensor([[[1, 2], [1, 2]], [[1, 2], [1, 3]]])
    tree, _ = pack_beam(beam, torch.tensor([0, 0]))
    small = trimmed(tree)
    assert small.nodes == 3 < tree.nodes == 4
    assert torch.equal(small.tokens, tree.tokens[:, :4])
    assert not bool(tree.valid[:, 4:].any())


def test_statistics_add_up(engine):
    parts = list(engine.stream(PROMPTS, max_new_tokens=15, temperature=1.0, seed=1))
    for row in range(len(PROMPTS)):
        own = [p for p in parts if p.row == row]
        stats = own[-1].stats
        assert stats.tokens == sum(len(p.tokens) for p in own) == 15
        assert stats.steps == len(own) - 1
        assert stats.accepted == sum(p.accepted for p in own) == sum(stats.accepted_per_step)
        assert stats.tokens_per_step == pytest.approx(14 / stats.steps)
        assert stats.nodes == 9 * stats.steps
        assert stats.lossless
        assert stats.rule == "seeded"
    assert any(p.accepted for p in parts)


@pytest.mark.parametrize("budget", range(2, 8))
def test_accepted_counts_what_the_end_cut_off(target, budget):
    """Steps of 4 guesses and 1 choice; a budget that ends among the guesses counts guesses only."""
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=30)]
    engine = Engine(target, OracleDrafter(PROMPTS, plain, 1.0), shape=Shape(width=1, length=4))
    for done in engine.generate(PROMPTS, max_new_tokens=budget):
        left = budget - 1
        assert done.stats.accepted_per_step == ([min(left, 4)] if left <= 5 else [4, left - 5])


def test_a_slow_reader_is_not_counted(engine, monkeypatch):
    clock, seconds = Clock(), []
    monkeypatch.setattr(decode, "time", clock)
    for part in engine.stream(PROMPTS[0], max_new_tokens=4):
        seconds.append(part.stats.seconds)
        clock.now += 10
    assert 0 < seconds[-1] < 1


def test_too_long_a_prompt_is_refused_before_the_others_are_written(target, monkeypatch):
    engine = Engine(target, NoDrafter())
    monkeypatch.setattr(engine, "complete", lambda *a: pytest.fail("nothing may be written"))
    with pytest.raises(PromptTooLong):
        engine.generate([*PROMPTS, [1] * 96], batch_size=2)


def test_lossy_rule_says_so(target):
    engine = Engine(target, recurrent_drafter(target), rule=RuleConfig(name="typical"))
    done = engine.generate(PROMPTS[0], max_new_tokens=5, temperature=1.0)
    assert done.stats.rule == "typical"
    assert not done.stats.lossless


def test_rejection_works_end_to_end_and_is_greedy_at_temperature_0(target):
    plain = [c.tokens for c in Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=12)]
    for branching in ((), (3, 1), (2, 2)):
        rule = RuleConfig(name="rejection", branching=branching)
        for drafter in (
            recurrent_drafter(target),
            recurrent_drafter(target, draft_vocab_size=9),
            ModelDrafter(target, target),
        ):
            engine = Engine(target, drafter, shape=Shape(width=1, length=3), rule=rule)
            assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=12)] == plain
            hot = engine.generate(PROMPTS, max_new_tokens=12, temperature=1.0, seed=3)
            again = engine.generate(PROMPTS, max_new_tokens=12, temperature=1.0, seed=3)
            assert [c.tokens for c in hot] == [c.tokens for c in again]
    with pytest.raises(ConfigError, match="needs a drafter with probabilities"):
        Engine(target, NgramDrafter(), rule=RuleConfig(name="rejection")).generate(PROMPTS[0])


class OnlyEven(theirs.LogitsProcessor):
    """Looks at (ids, scores): after an odd token only even ones."""

    def __call__(self, input_ids, scores):
        odd = (input_ids[:, -1] % 2 == 1)[:, None]
        return scores.masked_fill(odd & (torch.arange(scores.shape[-1]) % 2 == 1), -torch.inf)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}], ids=["cold", "hot"]
)
@pytest.mark.parametrize(
    "processor",
    [OnlyEven(), theirs.NoRepeatNGramLogitsProcessor(2), theirs.SequenceBiasLogitsProcessor([[[3, 1], 4.0]])],
)
def test_a_users_processor_sees_each_nodes_own_path(engine, processor, options):
    options = options | {"max_new_tokens": 20}
    free = [c.tokens for c in engine.generate(PROMPTS, **options)]
    plain = [c.tokens for c in engine.plain().generate(PROMPTS, logits_processor=[processor], **options)]
    assert [c.tokens for c in engine.generate(PROMPTS, logits_processor=[processor], **options)] == plain
    if not isinstance(processor, theirs.SequenceBiasLogitsProcessor):
        assert plain != free


class Counting(theirs.LogitsProcessor):
    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + self.calls * torch.arange(scores.shape[-1])


class NeedsMore(theirs.LogitsProcessor):
    def __call__(self, input_ids, scores, beam_indices):
        return scores


def test_processors_that_cannot_be_used_are_refused_by_name(engine):
    prefix = theirs.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1, 2], num_beams=1)
    for processor, reason in (
        (Counting(), "Counting cannot be used: it gives another result for the same"),
        (NeedsMore(), "NeedsMore cannot be used: besides ids and scores it needs beam_indices"),
        (prefix, "PrefixConstrainedLogitsProcessor cannot be used: it depends on the row's index"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine.generate(PROMPTS[0], logits_processor=[processor])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"n": 0}, "n must be"),
        ({"temperature": -1.0}, "temperature"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias names token"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a number"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\] must be a number"),
        ({"stop": "x"}, "need a tokenizer"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_new_token": 4}, "no option 'max_new_token'; did you mean max_new_tokens"),
        ({"do_sample": True}, "no option 'do_sample'; temperature=0 is greedy"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"logit_bias": {"5": 1.0}}, r"logit_bias\['5'\] must be a whole number"),
        ({"stop": [""]}, "stop string is empty"),
    ],
)
def test_bad_options(engine, options, word):
    with pytest.raises(ConfigError, match=word):
        engine.generate(PROMPTS[0], **options)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [([], "no prompt"), ([[]], "empty"), ([[VOCAB]], "outside"), ("hi", "tokenizer"), (None, "not None"), (5, "not 5")],
)
def test_bad_prompts(engine, prompt, word):
    with pytest.raises(ConfigError, match=word):
        engine.generate(prompt)


def test_prompts_of_other_libraries(engine):
    numpy = torch.tensor(PROMPTS[0]).numpy()
    assert engine.generate(numpy, max_new_tokens=4).tokens == engine.generate(PROMPTS[0], max_new_tokens=4).tokens
    assert engine.generate(list(numpy), max_new_tokens=4, seed=numpy[0]).seed == 3
    with pytest.raises(ConfigError, match="give the ids alone"):
        engine.generate({"input_ids": [PROMPTS[0]], "attention_mask": [[1] * 8]})


def test_width_larger_than_the_draft_vocabulary(target):
    engine = Engine(target, recurrent_drafter(target, draft_vocab_size=4), shape=Shape(width=5, length=2))
    with pytest.raises(ConfigError, match="beam width 5 is larger than the drafter's 4 tokens"):
        engine.generate(PROMPTS[0])


class Words:
    """A tokenizer smaller than both vocabularies: the rest is padding."""

    chat_template = None

    def get_vocab(self):
        return {f"w{i}": i for i in range(VOCAB - 4)}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"w{i}" for i in ids)


def test_draft_model_whose_vocabulary_is_padded_otherwise():
    mine = load_target(make_model(), tokenizer=Words())
    plain = [c.tokens for c in Engine(mine, NoDrafter()).generate(PROMPTS, max_new_tokens=12)]
    for size in (VOCAB - 3, VOCAB + 8):
        other = load_target(make_model("llama", vocab_size=size), tokenizer=Words())
        for shape in (Shape(width=3, length=2), Shape(width=1, length=2)):
            engine = Engine(mine, ModelDrafter(other, mine), shape=shape)
            prompts = [[t % (VOCAB - 4) for t in p] for p in PROMPTS]
            assert [c.tokens for c in engine.generate(prompts, max_new_tokens=12)] == plain


def test_a_loaded_model_is_a_drafter_and_a_number_is_not(target):
    engine = redrafter.load(target.model, drafter=make_model("llama", vocab_size=VOCAB))
    assert isinstance(engine.drafter, ModelDrafter)
    with pytest.raises(ConfigError, match="not 5"):
        redrafter.load(target.model, drafter=5)


def test_draft_model_of_another_vocabulary_is_refused(target):
    other = load_target(make_model("llama", vocab_size=VOCAB + 8))
    with pytest.raises(DrafterMismatch, match=rf"vocabulary of {VOCAB + 8}.*has {VOCAB}"):
        ModelDrafter(other, target)


def test_ngram_finds_the_longest_then_latest_match(target):
    drafter = NgramDrafter(longest=3, shortest=1)
    text = [9, 1, 2, 3, 7, 8, 2, 3, 5, 6, 1, 2, 3]
    ids = torch.tensor([text, [1, 2, 3, 4] + [0] * 9])
    state = drafter.begin(ids, torch.tensor([13, 4]), torch.zeros(2, 13, 0), 20)
    rule = make_rule(RuleConfig(), Shape(width=2, length=3), VOCAB, torch.float64)
    search = rule.search(Sampling.of([SamplingParams()] * 2, VOCAB, "cpu"), torch.tensor([0, 0]), torch.tensor([12, 3]))
    tree = drafter.draft(state, torch.tensor([3, 4]), search)
    paths = {tuple(tree.tokens[0][tree.mask[0, n]][1:].tolist()) for n in range(1, 7) if bool(tree.valid[0, n])}
    assert (7, 8, 2) in paths, "after 1 2 3, the longest match"
    assert (5, 6, 1) in paths, "after 2 3, the next longest"
    assert int(tree.valid[1].sum()) == 1, "nothing repeats: no guess"


def test_ngram_goes_on_with_a_loop():
    drafter = NgramDrafter()
    for loop in ([5], [5, 6], [5, 6, 7]):
        text = (loop * 12)[:12]
        state = drafter.begin(torch.tensor([text]), torch.tensor([12]), torch.zeros(1, 12, 0), 30)
        rule = make_rule(RuleConfig(), Shape(width=1, length=7), VOCAB, torch.float64)
        search = rule.search(Sampling.of([SamplingParams()], VOCAB, "cpu"), torch.tensor([0]), torch.tensor([11]))
        tree = drafter.draft(state, torch.tensor([text[-1]]), search)
        assert tree.tokens[0, 1:].tolist() == (loop * 12)[:7]


def test_a_shape_may_be_written_as_text(target):
    drafter = recurrent_drafter(target)
    engine = Engine(target, drafter, shape="3x2:4")
    assert engine.shape == Shape(width=3, length=2, nodes=4)
    assert engine.planner is None, "a given shape is always drafted"
    assert redrafter.load(target.model, drafter, shape="3x2:4").shape == engine.shape
    for given in ("3", "axb"):
        with pytest.raises(ConfigError, match="a shape is written WxL or WxL:N"):
            redrafter.load("no model is looked for", drafter, shape=given)
