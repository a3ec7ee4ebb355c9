"""A drafter with n-grams mixed in: exact text, more tokens per step where the text repeats."""

import pytest
import torch
from torch import Tensor

import redrafter
from redrafter import Engine, RuleConfig, SamplingParams, Shape
from redrafter.config import Gamma
from redrafter.core.accept import Accepted
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, RecurrentDrafter, WithNgrams, with_ngrams
from redrafter.drafters.checkpoint import write
from redrafter.drafters.with_ngrams import DEEPEST, FORGETS, PRIOR, updated_hits
from redrafter.engine.request import Request
from redrafter.errors import ConfigError, ModelNotFound
from redrafter.targets import load_target
from tests.helpers.zoo import ARCHITECTURES, PROMPTS, OracleDrafter, make_model, peer_drafter, recurrent_drafter

SHAPES = (Shape(width=5, length=3, nodes=12), Shape(width=24, length=1))
HOT = {"temperature": 1.0, "seed": 5}
PENALISED = HOT | {"repetition_penalty": 1.3, "presence_penalty": 0.4}
LOOP = [3, 8, 5, 9, 2, 7] * 4


def texts(engine: Engine, new: int = 28, **options):
    return [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=new, **options)]


@pytest.mark.parametrize("options", [{}, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_speculative_is_plain(kind, options):
    target = load_target(make_model(kind))
    plain = texts(Engine(target, NoDrafter()), **options)
    drafter = WithNgrams(recurrent_drafter(target, draft_vocab_size=30, memory_heads=2, memory_size=8))
    for shape in SHAPES:
        assert texts(Engine(target, drafter, shape=shape), **options) == plain, shape


OTHERS = {
    "eagle": lambda t: peer_drafter("eagle", t, draft_vocab_size=30),
    "medusa": lambda t: peer_drafter("medusa", t, draft_vocab_size=30),
    "model": lambda t: ModelDrafter(load_target(make_model(num_hidden_layers=1)), t),
    "heuristic": lambda t: ModelDrafter(load_target(make_model(num_hidden_layers=1)), t, gamma=Gamma.of("heuristic:2")),
}


@pytest.mark.parametrize("options", [{}, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("kind", OTHERS)
def test_every_drafter_takes_ngrams(kind, options, copier):
    for target in (load_target(make_model()), copier):
        plain = texts(Engine(target, NoDrafter()), **options)
        drafter = OTHERS[kind](target)
        joint = Engine(target, WithNgrams(drafter), shape=SHAPES[0])
        assert texts(joint, **options) == plain
    if not options:
        assert tokens_per_step(joint) > 1.5 * tokens_per_step(Engine(target, drafter, shape=SHAPES[0]))


def test_medusa_keeps_its_fixed_tree_where_nothing_matches():
    """Rows 0 and 2 have no chain; the twin is row 1, which has one."""
    target = load_target(make_model())
    medusa = peer_drafter("medusa", target)
    joint = WithNgrams(medusa)
    ids = torch.tensor([list(range(24)), LOOP, list(range(24, 0, -1))])
    at = torch.tensor([24, 24, 24])
    context = torch.randn(3, 24, target.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    shape = Shape(width=3, length=6, nodes=15)  # deeper than Medusa's heads
    sampling = Sampling.of([SamplingParams()] * 3, target.vocab_size, "cpu")
    search = make_rule(RuleConfig(), shape, target.vocab_size, torch.float64).search(sampling, at, at)
    last = ids[:, -1]
    alone = medusa.draft(medusa.begin(ids, at, context, 60), last, search)
    mixed = joint.draft(joint.begin(ids, at, context, 60), last, search)
    used = alone.tokens.shape[1]
    for name in ("tokens", "parents", "depths", "valid"):
        a, b = getattr(alone, name), getattr(mixed, name)
        assert torch.equal(a[::2], b[::2, :used]), name
    assert not mixed.valid[::2, used:].any()
    assert (
        mixed.tokens[1][mixed.mask[1, mixed.valid[1].nonzero()[-1, 0]]][1:].tolist()
        == LOOP[: int(mixed.depths[1].max())]
    )


def test_texts_end_inside_copied_tokens(copier):
    """At every end token and every limit inside a loop, of which a step accepts several tokens."""
    joint = repeating(copier)[1]
    plain = joint.plain().generate(PROMPTS[0], max_new_tokens=60).tokens
    places = range(40, 50)
    limits = [Request(prompt=PROMPTS[0], max_new_tokens=n, seed=0) for n in places]
    ends = [Request(prompt=PROMPTS[0], max_new_tokens=60, seed=0, eos=(plain[n],)) for n in places]
    done = [c.tokens for c in joint.complete(limits + ends)]
    assert done[: len(places)] == [plain[:n] for n in places]
    assert done[len(places) :] == [plain[: plain.index(plain[n]) + 1] for n in places]


def test_noise_of_deep_nodes_matters(monkeypatch):
    """The twin of the tests above: wrong noise below the beam's length changes sampled text."""
    from redrafter.core.rules import beam_search

    target = load_target(make_model("gpt2"))
    drafter = WithNgrams(recurrent_drafter(target))
    drafter.odds.fill_(0.97)
    engine = Engine(target, drafter, shape=Shape(width=8, length=1))
    cool = {"temperature": 0.2, "seed": 5, "new": 60}
    plain = texts(Engine(target, NoDrafter()), **cool)
    assert texts(engine, **cool) == plain
    true = beam_search.NoiseAhead.__call__

    def reversed_below(self, count):
        made = true(self, count)
        return torch.cat([made[:, :2], made[:, 2:].flip(2)], 1) if count > 2 else made

    monkeypatch.setattr(beam_search.NoiseAhead, "__call__", reversed_below)
    assert texts(engine, **cool) != plain


def repeating(target) -> tuple[Engine, Engine]:
    """The recurrent drafter alone and with n-grams, for a target that repeats its prompt."""
    shape = Shape(width=4, length=3, nodes=12)
    drafter = recurrent_drafter(target)
    return Engine(target, drafter, shape=shape), Engine(target, WithNgrams(drafter), shape=shape)


def copying_target():
    """A model whose next token depends on the last one alone, so that its text soon goes round in a loop."""
    model = make_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    return load_target(model)


@pytest.fixture(scope="module")
def copier():
    return copying_target()


def tokens_per_step(engine: Engine) -> float:
    return float(engine.generate(PROMPTS[0], max_new_tokens=60).stats.tokens_per_step)


def test_a_text_that_repeats_takes_fewer_steps(copier):
    alone, joint = repeating(copier)
    plain = alone.plain().generate(PROMPTS[0], max_new_tokens=60).tokens
    assert len(set(plain[30:])) < 20, "the text must repeat"
    assert joint.generate(PROMPTS[0], max_new_tokens=60).tokens == plain
    assert tokens_per_step(joint) > 2 * tokens_per_step(alone)


def test_the_chain_reaches_below_the_beam(copier):
    _, joint = repeating(copier)
    accepted = joint.generate(PROMPTS[0], max_new_tokens=60).stats.accepted_per_step
    assert max(accepted) > joint.shape.length


def test_copied_tokens_in_the_wrong_places_do_not(copier, monkeypatch):
    """The twin: the chain starts one token late."""
    alone, joint = repeating(copier)
    true = with_ngrams.find_chain
    monkeypatch.setattr(with_ngrams, "find_chain", lambda text: (true(text)[0].roll(1, -1), true(text)[1]))
    assert tokens_per_step(joint) < 2 * tokens_per_step(alone)


@pytest.mark.parametrize("read", [True, False], ids=["table of all tokens", "table of guessed tokens"])
def test_a_precomputed_table_continues_after_copied_tokens(read, monkeypatch):
    """What a GPU decodes with. The twin: a table without the copied tokens guesses something else after them."""
    if not read:
        monkeypatch.setattr(RecurrentDrafter, "read_every_token", lambda self: None)
    target = load_target(make_model())
    direct, folded = (recurrent_drafter(target, first_state="zero", draft_vocab_size=12) for _ in range(2))
    folded._precompute()
    WithNgrams(folded)
    every = torch.arange(target.vocab_size)
    assert torch.allclose(folded.token_input(every), direct.token_input(every)) == read


def accepted(tokens: list[list[int]], counts: list[int]) -> Accepted:
    new, count = torch.tensor(tokens), torch.tensor(counts)
    return Accepted(0 * new, new, count, 0 * count, 0 * count)


def test_hits_are_counted_up_to_the_first_wrong_token():
    chain = torch.tensor([[1, 2, 3, 4]] * 5)
    before = torch.full((5, 2), PRIOR)
    match = torch.tensor([2, 2, 2, 0, 2])
    steps = accepted([[1, 2, 9], [9, 2, 3], [1, 2, 9], [1, 2, 3], [1, 2, 3]], [3, 3, 2, 3, 0])
    after = updated_hits(before, chain, match, steps) - FORGETS * PRIOR
    assert after[:3].round().tolist() == [[2, 3], [0, 1], [2, 2]]
    rest: Tensor = after[3:] + FORGETS * PRIOR
    assert torch.equal(rest, before[3:]), "no match, or a row that has ended: nothing is learned"


def test_a_row_whose_copies_fail_trusts_them_less():
    target = load_target(make_model())
    drafter = WithNgrams(recurrent_drafter(target))
    ids = torch.tensor([LOOP, LOOP])
    state = drafter.begin(ids, torch.tensor([24, 24]), torch.zeros(2, 24, 32, dtype=torch.float64), 60)
    assert state.match.tolist() == [5, 5]
    assert state.chain.tolist() == [(LOOP * 2)[:DEEPEST]] * 2
    state = drafter.advance(state, accepted([[3], [4]], [1, 1]), torch.zeros(2, 1, 32, dtype=torch.float64))
    right, wrong = (state.hits[:, 0] / state.hits[:, 1]).tolist()
    assert right == 1.0 > wrong
    assert state.match.tolist() == [5, 0]


def test_names(tmp_path):
    target = load_target(make_model())
    write(tmp_path / "mine", recurrent_drafter(target).net, target)
    engine = redrafter.load(target.model, drafter=f"{tmp_path / 'mine'}+ngram")
    assert isinstance(engine.drafter, WithNgrams)
    assert engine.drafter.name == "recurrent+ngram"
    assert engine.shape == engine.drafter.inner.default_shape
    for name in ("auto", "auto+ngram"):  # no drafter comes with the package for this model
        assert isinstance(redrafter.load(target.model, drafter=name).drafter, NgramDrafter)
    for name in ("recurrent", "recurrent+ngram"):
        with pytest.raises(ModelNotFound, match="no recurrent drafter comes with the package"):
            redrafter.load(target.model, drafter=name)


def test_what_ngrams_cannot_mix_into_is_refused():
    target = load_target(make_model())
    for drafter in (NoDrafter(), NgramDrafter(), WithNgrams(recurrent_drafter(target))):
        with pytest.raises(ConfigError, match=f"not into {type(drafter).__name__}"):
            WithNgrams(drafter)
    with pytest.raises(ConfigError, match="a drafter that gives probabilities"):
        texts(Engine(target, WithNgrams(OracleDrafter(PROMPTS, PROMPTS, 1.0)), shape=Shape(width=2, length=2)))


def test_the_rejection_rule_drafts_without_ngrams():
    """The rule needs draws from one distribution: the text is that of the drafter alone."""
    target = load_target(make_model())
    rule, alone = RuleConfig(name="rejection"), recurrent_drafter(target)
    one, two = (Engine(target, d, rule=rule) for d in (alone, WithNgrams(alone)))
    assert texts(one, **HOT) == texts(two, **HOT)
