"""Tuning: a choice with a known answer on made-up costs, a profile on disk, and who picks it up. No clock is read."""

import dataclasses
import json
import logging
from collections.abc import Sequence

import pytest
import torch

import redrafter
from redrafter import Engine, RuleConfig, Shape
from redrafter.cli.main import main
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.engine import profile as profiles
from redrafter.engine.profile import Choice, Drafted, Guessed, Profile, Stepped, Verified, key_of, save
from redrafter.errors import CacheUnavailable, ConfigError
from redrafter.targets import load_target
from redrafter.train import tune as tuning
from redrafter.train.cost import Effort, Filler, time_steps
from redrafter.train.openings import own_texts
from redrafter.train.tune import Plan, tune
from tests.helpers.letters import TEMPLATE, make_target, tokenizer
from tests.helpers.zoo import PROMPTS, make_model, recurrent_drafter

CHAIN, TREE = Shape(width=1, length=3, nodes=3), Shape(width=2, length=4, nodes=7)
PLAN = Plan((1, 2), (1, 3), (1, 3, 5), 4, 12, Effort(1, 1, 2, 60), Effort(1, 1, 2, 60), finalists=3)


def made_up(chain_draft: float = 1.0, node: float = 1.0, **changes) -> Profile:
    """Plain decoding takes 10 ms a step, each node more; the tree guesses further than the chain."""
    verified = tuple(Verified(batch, n, 10 + batch * node * n) for batch in (1, 8) for n in (0, 3, 7))
    drafted = tuple(row for batch in (1, 8) for row in (Drafted(batch, 1, 3, chain_draft), Drafted(batch, 2, 4, 3.0)))
    made = Profile(
        key={"target": "made up"},
        name="made/up",
        temperature=0.0,
        verified=verified,
        drafted=drafted,
        guessed=(Guessed(CHAIN, 0.0, 2.0), Guessed(TREE, 0.0, 2.5)),
    )
    shapes = (None, CHAIN, TREE)
    stepped = tuple(Stepped(batch, shape, made.priced_ms(shape, batch)) for batch in (1, 8) for shape in shapes)
    made = dataclasses.replace(made, stepped=stepped)
    choices = tuple(Choice(batch, made.fastest(batch)) for batch in (1, 8))
    return dataclasses.replace(made, **({"choices": choices} | changes))


def test_the_fastest_shape_is_chosen_row_by_row():
    """One row: 2.0 tokens in 14 ms beat 2.5 in 20 and 1 in 10. Eight rows: 35 ms and 69 ms do not beat 10."""
    made = made_up()
    assert made.expected(CHAIN, 1) == pytest.approx(2000 / 14)
    assert made.expected(TREE, 1) == pytest.approx(2500 / 20)
    assert made.expected(None, 1) == pytest.approx(100)
    assert made.choose(1) == CHAIN
    assert made.choose(8) is None, "plain decoding"
    assert made.expected(None, 8) == pytest.approx(800), "all rows together"
    assert (made.choose(3), made.choose(64)) == (CHAIN, None), "the nearest batch that was measured"


def test_the_fastest_shape_is_chosen_twin():
    """With another cost of the chain's guesses, or of nodes, the choice is another."""
    assert made_up(chain_draft=8.0).choose(1) == TREE
    assert made_up(node=10.0).choose(1) is None


def test_a_gain_within_the_noise_is_none():
    barely = Profile(
        key={},
        name="",
        temperature=0.0,
        verified=(Verified(1, 0, 10.0),),
        guessed=(Guessed(CHAIN, 0.0, 2.0),),
        stepped=(Stepped(1, None, 10.0), Stepped(1, CHAIN, 19.6)),
    )
    assert barely.fastest(1) is None
    clearly = dataclasses.replace(barely, stepped=(Stepped(1, None, 10.0), Stepped(1, CHAIN, 19.0)))
    assert clearly.fastest(1) == CHAIN


def test_costs_between_and_beyond_the_measured():
    made = made_up()
    assert [made.verify_ms(n, 1) for n in (0, 2, 3, 5, 7, 9)] == pytest.approx([10, 12, 13, 15, 17, 19])
    assert made.step_ms(Shape(width=1, length=3), 1) == made.step_ms(CHAIN, 1), "a budget of all nodes, spelled or not"
    with pytest.raises(ConfigError, match="knows nothing of W=9"):
        made.expected(Shape(width=9, length=9), 1)


def test_shapes_not_measured_whole_are_held_against_plain_decoding_by_the_same_measure():
    """Costs of recorded steps, whole steps compiled and twice as fast: the tree's 20 ms stand for 10."""
    made = dataclasses.replace(made_up(), stepped=(Stepped(1, None, 5.0), Stepped(1, CHAIN, 6.0)))
    assert made.step_ms(CHAIN, 1) == 6.0, "measured"
    assert made.step_ms(TREE, 1) == pytest.approx(10.0)
    assert made.expected(TREE, 1) / made.expected(None, 1) == pytest.approx(2.5 / 2)
    assert dataclasses.replace(made, stepped=()).step_ms(TREE, 1) == pytest.approx(20.0), "nothing measured whole yet"


@pytest.fixture
def kept_in(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "folder", lambda: tmp_path / "profiles")
    return tmp_path / "profiles"


def test_a_profile_survives_the_disk(kept_in):
    made = made_up()
    path = save(made)
    assert profiles.read(path) == made
    assert [p.name for p in kept_in.iterdir()] == [path.name], "no scratch file is left"
    again = made_up(chain_draft=8.0)
    assert save(again) == path
    assert list(profiles.kept()) == [again]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": "0.1.0", "odd": 1}', "half"])
def test_a_damaged_profile_is_ignored_with_one_line(kept_in, caplog, content):
    path = save(made_up())
    path.write_text(path.read_text()[:100] if content == "half" else content)
    with caplog.at_level(logging.INFO):
        assert profiles.read(path) is None
    assert len(caplog.records) == 1
    assert "run redrafter tune again" in caplog.text


def test_an_outdated_profile_is_ignored_with_one_line(kept_in, caplog):
    path = save(made_up(version="0.0.1"))
    assert profiles.read(path) is None
    assert "is of redrafter 0.0.1" in caplog.text


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(profiles, "folder", lambda: tmp_path / "file" / "profiles")
    with pytest.raises(CacheUnavailable, match="cannot keep the profile"):
        save(made_up())


def tuned_to(shape: Shape | None, target, drafter) -> None:
    key = key_of(target, drafter, "auto")
    save(made_up(key=key, name=target.name, choices=(Choice(1, shape),)))


def test_load_picks_the_profile_up(kept_in, caplog):
    model = make_model()
    target = load_target(model)
    drafter = recurrent_drafter(target)
    assert redrafter.load(model, drafter).shape == drafter.default_shape, "nothing was tuned yet"
    tuned_to(TREE, target, drafter)
    engine = redrafter.load(model, drafter)
    assert (engine.drafter, engine.shape) == (drafter, TREE)
    assert redrafter.load(model, drafter, shape=CHAIN).shape == CHAIN, "who says a shape gets it"
    other_rule = redrafter.load(model, drafter, rule=RuleConfig(name="rejection"))
    assert other_rule.shape == drafter.default_shape, "tuning knows the seeded rule only"
    tuned_to(None, target, drafter)
    with caplog.at_level(logging.INFO):
        engine = redrafter.load(model, drafter)
    assert isinstance(engine.drafter, NoDrafter)
    assert [r.message for r in caplog.records if "plain decoding" in r.message]
    assert redrafter.load(model, drafter, shape=CHAIN).drafter is drafter


def test_another_combination_is_not_tuned(kept_in):
    model = make_model()
    target = load_target(model)
    drafter = recurrent_drafter(target)
    tuned_to(TREE, target, drafter)
    assert redrafter.load(model, NgramDrafter()).shape == NgramDrafter.default_shape
    assert redrafter.load(model, recurrent_drafter(target, exit_size=32)).shape != TREE
    assert redrafter.load(make_model("qwen3"), NgramDrafter()).shape == NgramDrafter.default_shape
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert redrafter.load(model, drafter).shape != TREE
    finally:
        torch.set_num_threads(threads)
    assert redrafter.load(model, drafter).shape == TREE


def test_a_profile_under_anothers_name_is_ignored(kept_in, caplog):
    """As if two keys had one digest."""
    target = load_target(make_model())
    drafter = recurrent_drafter(target)
    key = key_of(target, drafter, "auto")
    path = save(made_up(key=key, name=target.name))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"key": key | {"dtype": "other"}}))
    assert profiles.find(target, drafter, "auto") is None
    assert "measured with something else" in caplog.text


def test_steps_of_a_filler_verify_its_nodes_and_change_no_text():
    target = load_target(make_model())
    plain = Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=9)
    filled = Engine(target, Filler(5, NoDrafter())).generate(PROMPTS, max_new_tokens=9)
    assert [c.tokens for c in filled] == [c.tokens for c in plain]
    assert all(c.stats.nodes == 5 * c.stats.steps for c in filled)


def test_steps_are_timed_in_turns():
    target = load_target(make_model())
    engine = Engine(target, recurrent_drafter(target), shape=CHAIN)
    heard = []
    openings = [PROMPTS[:2], PROMPTS[2:4]]
    plain, others = time_steps(
        engine.plain(), [engine, engine], openings, Effort(2, 3, 2, 60), 0.0, lambda: heard.append(1)
    )
    assert plain > 0
    assert len(others) == 2
    assert min(others) > 0
    assert len(heard) == 6
    time_steps(engine.plain(), [engine], openings, Effort(2, 3, 2, 0), 0.0, lambda: heard.append(1))
    assert len(heard) == 7, "no further turn once the time is up"
    full = [[[1] * 95]]
    with pytest.raises(ConfigError, match="too short"):
        time_steps(engine.plain(), [engine], full, Effort(1, 1, 2, 60))


def made_up_times(node: float, draft: float):
    """Steps that cost 10 ms, and so much for each node and each guess."""

    def cost(engine: Engine) -> float:
        guesses = 0 if isinstance(engine.drafter, NoDrafter) else engine.shape.width * engine.shape.length
        nodes = 0 if type(engine.drafter) is NoDrafter else engine.shape.budget
        return 10 + node * nodes + draft * guesses

    return lambda plain, contenders, *rest: (cost(plain), [cost(engine) for engine in contenders])


def made_up_walks(target, drafter, texts, shapes: Sequence[Shape], temperature: float, report) -> list[Guessed]:
    """Wider and longer guesses and more nodes hold further, each a little less than the one before."""
    return [Guessed(s, temperature, 1 + 0.5 * s.length**0.5 + 0.2 * s.width + 0.05 * s.budget) for s in shapes]


@pytest.mark.parametrize(("node", "draft"), [(0.1, 0.1), (2.0, 0.1), (0.1, 3.0), (40.0, 40.0)])
def test_tuning_finds_the_best_of_the_grid(monkeypatch, node, draft):
    monkeypatch.setattr(tuning, "time_steps", made_up_times(node, draft))
    monkeypatch.setattr(tuning, "walked", made_up_walks)
    target = load_target(make_model())
    drafter = recurrent_drafter(target)
    got = tune(target, drafter, batches=[4, 1], plan=PLAN)
    rates = {
        g.shape: g.tokens_per_step / (10 + node * g.shape.budget + draft * g.shape.width * g.shape.length)
        for g in got.guessed
    }
    best = max(rates, key=rates.__getitem__)
    wanted = best if rates[best] > 1.03 / 10 else None
    assert [c.batch for c in got.choices] == [1, 4]
    assert got.choose(1) == wanted
    for shape, rate in rates.items():
        assert got.expected(shape, 1) == pytest.approx(1000 * rate), "few measurements price the whole grid"
    assert (wanted is None) == (node == 40.0)


def test_tuning_for_real():
    """Toy scale: everything is measured, whatever comes out."""
    target = make_target()
    for drafter in (recurrent_drafter(target), NgramDrafter()):
        heard: list[str] = []

        def hear(what: str, done: int, total: int, heard: list[str] = heard) -> None:
            assert 0 <= done <= total
            heard.append(what)

        got = tune(target, drafter, plan=PLAN, prompts=["why is it so", "who"], progress=hear)
        assert got.choose(1) in {None, *(g.shape for g in got.guessed)}
        assert all(g.tokens_per_step >= 1 for g in got.guessed)
        assert list(dict.fromkeys(heard)) == [
            "writing texts", "tokens/step", "costs, 1 row", "the best few, 1 row",
        ]  # fmt: skip
    with pytest.raises(ConfigError, match="nothing to tune"):
        tune(target, NoDrafter())
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        tune(target, NgramDrafter(), batches=[0])


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_texts_to_tune_with_are_the_targets_own(template):
    target = make_target(template)
    plain = Engine(target, NoDrafter())
    texts = own_texts(plain, None, count=3, length=8)
    assert 1 <= len(texts) <= 3
    for i in range(len(texts)):
        row, prompt = texts.row(i).tolist(), int(texts.prompts[i])
        [again] = [plain.generate(row[:prompt], max_new_tokens=8).tokens]
        assert again == row[prompt:]


def toy_folders(folder):
    target = load_target(make_model(dtype=torch.float32), tokenizer=tokenizer())
    target.model.save_pretrained(folder / "model")
    target.tokenizer.save_pretrained(folder / "model")
    recurrent_drafter(target).save(folder / "drafter", target)
    return ["--model", str(folder / "model"), "--drafter", str(folder / "drafter")]


def test_command(capsys, tmp_path, kept_in):
    where = toy_folders(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "why is it so"}\n{"prompt": "who are we"}\n')
    assert main(["tune", *where, "--quick", "--batch", "1", "2", "--prompts", str(prompts)]) == 0
    out = capsys.readouterr().out
    for word in ("plain", "3x3:5", "tokens/s", "speedup", "1 row:", "2 rows:", "kept in"):
        assert word in out
    [profile] = profiles.kept()
    assert [c.batch for c in profile.choices] == [1, 2]
    assert main(["generate", *where, "--max-new-tokens", "4", "hi"]) == 0
    assert main(["eval", *where, "--questions", str(prompts), "--max-new-tokens", "4"]) == 0
    assert "3x3:5" in capsys.readouterr().out, "eval judges the drafter's own shape"
    assert main(["doctor"]) == 0
    assert "model with recurrent in float32" in " ".join(capsys.readouterr().out.split())
    assert main(["tune", *where, "--batch", "0"]) == 2
    assert main(["tune", *where, "--drafter", "none"]) == 2


def test_a_shape_on_the_command_line_beats_a_profile_that_says_plain(capsys, tmp_path, kept_in):
    where = toy_folders(tmp_path)
    engine = redrafter.load(where[1], where[3])
    tuned_to(None, engine.target, engine.drafter)
    assert main(["generate", *where, "--max-new-tokens", "4", "--width", "2", "hi"]) == 0
    assert "plain decoding" not in capsys.readouterr().err
    assert isinstance(redrafter.load(where[1], where[3]).drafter, NoDrafter)


def test_interrupted_tuning_leaves_nothing(capsys, tmp_path, kept_in, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "time_steps", interrupted)
    assert main(["tune", *toy_folders(tmp_path), "--quick"]) == 130
    assert not kept_in.exists()
