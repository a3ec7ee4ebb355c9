"""Training data: the target's own texts, the same after any interruption, and what is wrong with a folder."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from redrafter.cli.distill import add_distill_options
from redrafter.cli.fields import from_fields
from redrafter.cli.main import main
from redrafter.core.noise import fold
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch, RedrafterError
from redrafter.targets import Target, load_target
from redrafter.texts import Texts, concatenate
from redrafter.train import data_folder as folders
from redrafter.train import dataset as texts
from redrafter.train.config import DistillConfig
from redrafter.train.dataset import read_texts
from redrafter.train.distill import Remembered, _Writer, distill
from redrafter.train.lock import only_writer
from redrafter.train.self_prompts import Piece, SelfPrompts, user_turn
from redrafter.train.task_prompts import FOLLOW_UPS, STARTS, TASKS, TaskPrompts
from tests.helpers.letters import ALPHABET, END, FILE, SMALL, files, make_target, plain, rows, tokenizer
from tests.helpers.zoo import VOCAB, make_model


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def test_rows_are_the_targets_own_texts(target, tmp_path):
    done = distill(target, tmp_path, SMALL, prompts=FILE, self_prompt=True)
    made = read_texts(tmp_path, target)
    assert (len(made), done.rows) == (10, 10)
    assert rows(made) == plain(target, made)
    assert made.temperatures.tolist() == [0.0, 1.0] * 5
    assert made.seeds.tolist() == [fold(0, i) for i in range(10)]
    assert done.tokens == len(made.tokens) == int(made.lengths.sum())
    assert done.answer_tokens == done.tokens - int(made.prompts.sum())
    first = {target.tokenizer.decode(made.row(i)[1 : made.prompts[i] - 2]) for i in range(4)}
    assert first == {t.replace(" ", "a") for t in FILE}, "the file first, each once (this tokenizer has no space)"
    other = distill(target, tmp_path / "b", SMALL, prompts=FILE)
    assert other.rows == 4, "no more texts than prompts"


def test_how_many_at_once_changes_nothing(target, tmp_path):
    for batch in (1, 7):
        config = DistillConfig(**vars(SMALL) | {"batch": batch, "texts": 7})
        distill(target, tmp_path / str(batch), config, prompts=FILE, self_prompt=True)
    assert files(tmp_path / "1") == files(tmp_path / "7")


def test_a_model_without_a_template_writes_whole_texts(tmp_path):
    for maker in (lambda: make_target(None), lambda: load_target(make_model())):
        target = maker()
        folder = tmp_path / str(target.tokenizer is None)
        distill(target, folder, SMALL, self_prompt=True)
        made = read_texts(folder, target)
        assert set(made.prompts.tolist()) == {1}
        assert set(made.temperatures.tolist()) == {1.0}
        assert rows(made) == plain(target, made)


def test_user_turns_come_from_the_template(target):
    turn = user_turn(target)
    assert turn.prefix == (VOCAB - 2,)
    assert turn.ends == (END,)
    hidden = load_target(make_model(), tokenizer=tokenizer(template="{{ messages[0].role }}"))
    with pytest.raises(ConfigError, match="hides what the user says"):
        user_turn(hidden)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("abcdefgh<e>", None),
        ("abcdefgh", "did not end"),
        ("abcd<u>efgh<e>", "special tokens inside"),
        ("abc<e>", "hardly any words"),
        ("<e>", "hardly any words"),
        ("abcabcabcabc<e>", "repetitive"),
    ],
)
def test_turns_of_no_use(target, said, reason):
    source = SelfPrompts(target, list, seed=0, budget=9, rows=1)
    tokens = target.tokenizer(said)["input_ids"]
    assert source._reason(tokens, target.tokenizer.decode(tokens[:-1])) == reason


def test_duplicates_are_dropped_across_shards(target, tmp_path):
    prompts = [*FILE, "WHO  are we", "\n", "b" * 80, *FILE, "the last one"]
    config = DistillConfig(**vars(SMALL) | {"shard": 2, "texts": 20})
    done = distill(target, tmp_path, config, prompts=prompts)
    assert done.rows == 5
    assert done.dropped == {"duplicate": 5, "empty": 1, "too long": 1}
    before = files(tmp_path)
    assert distill(target, tmp_path, config, prompts=prompts) == done
    assert files(tmp_path) == before
    with pytest.raises(ConfigError, match="no prompt was of use"):
        distill(target, tmp_path / "none", config, prompts=["", "b" * 80])


@pytest.fixture
def tasks(target, monkeypatch):
    """What `distill` takes its prompts from, with every second pair of prompts a task."""
    monkeypatch.setattr("redrafter.train.task_prompts.ARTICLE_TOKENS", 12)
    config = DistillConfig(**vars(SMALL) | {"tasks": 50, "batch": 16})
    (source,) = _Writer(target, config, None).sources(None, True, None)
    assert isinstance(source, Remembered)
    assert isinstance(source.source, TaskPrompts)
    return source.source


def test_pieces_that_were_not_used_are_not_written_again():
    class Counted:
        endless, asked = False, []

        def take(self, first, count):
            self.asked.append((first, count))
            return [Piece([i], i) for i in range(first, min(first + count, 12))]

    source = Remembered(Counted())
    taken = [[p.mark for p in source.take(*asked)] for asked in ((0, 8), (3, 4), (5, 6), (8, 9))]
    assert taken == [[*range(8)], [3, 4, 5, 6], [*range(5, 11)], [8, 9, 10, 11]]
    assert Counted.asked == [(0, 8), (8, 3), (11, 6)]


def test_tasks_come_in_every_kind_and_share(tasks):
    kinds = [tasks._kind(i) for i in range(240)]
    names = [write.__name__ for write, _ in kinds]
    assert names.count("_free") == 120
    assert {names.count(n) for n in ("_started", "_on_documents", "_conversations")} == {40}
    for name in set(names):
        assert [n for (_, n), own in zip(kinds, names, strict=True) if own == name] == list(range(names.count(name)))
        assert len({i % 2 for i, own in enumerate(names) if own == name}) == 2, "each kind at both temperatures"
    tasks.percent = 100
    assert {tasks._kind(i)[0].__name__ for i in range(9)} == {"_started", "_on_documents", "_conversations"}


def test_a_task_is_the_same_whenever_it_is_asked_for(tasks):
    whole = tasks.take(0, 24)
    assert [p for start, count in ((0, 7), (7, 13), (20, 4)) for p in tasks.take(start, count)] == whole
    used = [p for p in whole if p.dropped is None]
    assert len({p.mark for p in used}) > 0.9 * len(used)


def test_tasks_hold_what_they_ask_about(target, tasks, monkeypatch):
    """The document, the words that a turn starts with, and the conversation so far stand in the prompt."""
    chats = []
    monkeypatch.setattr(tasks.free, "pieces", lambda made, reasons: chats.extend(made) or [None] * len(made))
    tasks._started([0, 1])
    assert [c[0].startswith(start) for c, start in zip(chats, STARTS, strict=False)] == [True, True]
    chats.clear()
    tasks._on_documents([15, 16])  # of document 3, which has four articles
    document = tasks.documents[3]
    assert chats == [(TASKS[5].format(text=document),), (TASKS[6].format(text=document),)]
    assert document.count("\n\n") <= 3
    chats.clear()
    tasks._conversations(list(range(6)))
    assert {len(c) for c in chats} <= {2, 3}
    three = [c for c in chats if len(c) == 3]
    assert any(c[2] in FOLLOW_UPS for c in three)
    turn = user_turn(target, three[0][:2], "ab")
    said = target.tokenizer.decode(turn.prefix)
    assert said == f"<u>{three[0][0]}<e><a>{three[0][1]}<e><u>ab".replace(" ", "a")


def test_a_target_with_nothing_to_say(target, tmp_path, monkeypatch):
    monkeypatch.setattr("redrafter.train.self_prompts.write_texts", lambda t, starts, *a, **k: [[END]] * len(starts))
    with pytest.raises(ConfigError, match=r"hardly any prompts of use \(0 of 50\d; hardly any words"):
        distill(target, tmp_path, SMALL, self_prompt=True)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from redrafter.train import dataset as texts
from redrafter.train.distill import distill
from tests.helpers.letters import FILE, SMALL, make_target
put, count = texts._put, [0]
def killed(path, content):
    count[0] += 1
    if count[0] == int(sys.argv[3]):
        path.with_name(f".{path.name}.part").write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    put(path, content)
texts._put = killed
distill(make_target(), Path(sys.argv[1]), SMALL, prompts=FILE, self_prompt=True)
"""


@pytest.mark.parametrize(("write", "shards"), [(4, 1), (5, 2)])
@pytest.mark.slow
def test_a_killed_run_goes_on(target, tmp_path, write, shards):
    """Killed while writing a shard's file, and between a shard and its manifest."""
    root = Path(__file__).parents[2]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    arguments = [str(broken), str(root), str(write)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert len(list(broken.glob("*.safetensors"))) == shards
    assert len(list(broken.glob(".*.part"))) == 1
    assert len(json.loads((broken / "manifest.json").read_text())["shards"]) == 1
    told = []
    distill(target, whole, SMALL, prompts=FILE, self_prompt=True)
    distill(target, broken, SMALL, prompts=FILE, self_prompt=True, progress=lambda r, t: told.append((r, t)))
    assert files(broken) == files(whole)
    assert told[0] == (4, 0), "the finished shard is read, not written"
    assert sum(r for r, _ in told) == 10


def test_a_damaged_shard_is_named_and_made_anew(target, tmp_path):
    distill(target, tmp_path, SMALL, prompts=FILE, self_prompt=True)
    before = files(tmp_path)
    shard = tmp_path / "texts-00001.safetensors"
    for damage in (lambda: shard.write_bytes(shard.read_bytes()[:-1]), shard.unlink):
        damage()
        with pytest.raises(CorruptCheckpoint, match=r"texts-00001.safetensors is .* again with the same settings"):
            read_texts(tmp_path, target)
        distill(target, tmp_path, SMALL, prompts=FILE, self_prompt=True)
        assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "prompts", "says"),
    [
        ({"seed": 1}, FILE, "was made with seed=0, not 1; choose another folder"),
        ({"temperatures": (0.0,)}, FILE, "was made with temperatures="),
        ({"texts": 3}, FILE, "texts=10, not 3"),
        ({}, FILE[1:], "was made with prompts="),
    ],
)
def test_other_settings_need_another_folder(target, tmp_path, changes, prompts, says):
    distill(target, tmp_path, SMALL, prompts=FILE)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=says):
        distill(target, tmp_path, DistillConfig(**vars(SMALL) | changes), prompts=prompts)
    assert files(tmp_path) == before
    same = DistillConfig(**vars(SMALL) | {"shard": None, "batch": None})
    assert distill(target, tmp_path, same, prompts=FILE).rows == 4, "what is left open is as it was"


def test_another_target_needs_another_folder(target, tmp_path):
    distill(target, tmp_path, SMALL, prompts=FILE)
    other = load_target(make_model("qwen2"), tokenizer=tokenizer())
    with pytest.raises(ConfigError, match="but qwen2 has other weights; choose"):
        distill(other, tmp_path, SMALL, prompts=FILE)


def test_data_of_another_tokenizer(target, tmp_path, caplog):
    distill(target, tmp_path, SMALL, prompts=FILE)
    other = load_target(make_model(), tokenizer=tokenizer(ALPHABET[::-1]))
    with pytest.raises(DrafterMismatch, match=r"the data in .* was made for the tokenizer of llama .* has another"):
        read_texts(tmp_path, other)
    fine_tune = load_target(make_model("qwen2"), tokenizer=tokenizer())
    read_texts(tmp_path, fine_tune)
    assert "has other weights" in caplog.text


@pytest.mark.parametrize("size", [12, 2000])
def test_data_of_another_vocabulary(target, tmp_path, size):
    """Neither model need have a tokenizer that tells them apart."""
    distill(target, tmp_path, SMALL, prompts=FILE)
    other = load_target(make_model("llama", vocab_size=size))
    with pytest.raises(DrafterMismatch, match=rf"a vocabulary of {target.vocab_size} tokens, but llama has {size}"):
        read_texts(tmp_path, other)


@pytest.mark.parametrize("rollouts", [False, True])
def test_data_with_tokens_outside_the_vocabulary(target, tmp_path, rollouts):
    made = folders.Folder(tmp_path, {}, {})
    tokens = [1, 2] if rollouts else [1, target.vocab_size]
    ahead = [torch.tensor([[3], [target.vocab_size]])] if rollouts else None
    made.open()
    made.add(0, Texts.of([tokens], [1], [0.0], [0], ahead), [5], [0], {})
    with pytest.raises(CorruptCheckpoint, match=f"outside the vocabulary of {target.vocab_size}"):
        read_texts(tmp_path, target)


def test_folders_without_texts(target, tmp_path, caplog):
    with pytest.raises(CorruptCheckpoint, match=r"is no folder of training data: it has no manifest.json"):
        read_texts(tmp_path, target)
    made = folders.Folder(tmp_path, {}, {})
    made.open()
    with pytest.raises(CorruptCheckpoint, match="holds no texts"):
        read_texts(tmp_path, target)
    made.add(0, Texts.of([[1, 2]], [1], [0.0], [0]), [5], [0], {})
    with caplog.at_level(logging.WARNING):
        assert rows(read_texts(tmp_path, target)) == [[1, 2]]
    assert "is not complete: using the 1 texts there are" in caplog.text
    for content in ("{", "[]", '{"shards": 3}', '{"target": {}, "settings": {}, "complete": true, "shards": [{}]}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(CorruptCheckpoint, match=r"manifest.json"):
            read_texts(tmp_path, target)


def test_a_disk_too_small_is_told_at_once(target, tmp_path, monkeypatch):
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda p: type("Usage", (), {"free": 5 << 20})())
    many = DistillConfig(**vars(SMALL) | {"texts": 10**6})
    with pytest.raises(RedrafterError, match=r"1000000 texts may need \d+ MiB, but .* has 5 MiB free"):
        distill(target, tmp_path / "new", many, self_prompt=True)
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up(target, tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(self, content):
        if "00001" in self.name:
            write(self, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(RedrafterError, match=r"no space left in .* what is finished is intact"):
            distill(target, tmp_path, SMALL, prompts=FILE, self_prompt=True)
    assert sorted(files(tmp_path)) == ["manifest.json", "texts-00000.safetensors"]
    assert len(read_texts(tmp_path, target)) == 4
    distill(target, tmp_path, SMALL, prompts=FILE, self_prompt=True)
    assert len(read_texts(tmp_path, target)) == 10


def test_a_folder_that_is_a_file(target, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RedrafterError, match="choose another folder"):
        distill(target, tmp_path / "file", SMALL, prompts=FILE)


def test_selecting_and_joining():
    first = Texts.of([[1, 2, 3], [4]], [1, 1], [0.0, 1.0], [2**64 - 1, 1], [torch.ones(3, 2), torch.zeros(1, 2)])
    joined = concatenate([first, first.select([1])])
    assert rows(joined) == [[1, 2, 3], [4], [4]]
    assert joined.seeds.tolist() == [-1, 1, 1]
    assert joined.rollouts is not None
    back = joined.select(torch.tensor([2, 0]))
    assert rows(back) == [[4], [1, 2, 3]]
    assert back.rollouts is not None
    assert back.rollouts.tolist() == [[0, 0]] + [[1, 1]] * 3


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"texts": 0}, "texts must be at least 1, got 0"),
        ({"shard": 0}, "shard must be at least 1"),
        ({"temperatures": ()}, "at least 1"),
        ({"temperatures": (-1.0,)}, "at least 0, got -1.0"),
        ({"local": -1}, "local must be at least 0"),
        ({"tasks": 101}, "tasks must be at most 100, got 101"),
    ],
)
def test_bad_settings(bad, says):
    with pytest.raises(ConfigError, match=says):
        DistillConfig(**bad)


def test_command(capsys, tmp_path):
    make_target().model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    questions, out = tmp_path / "q.jsonl", tmp_path / "out"
    questions.write_text("\n".join(json.dumps({"prompt": p}) for p in [*FILE, FILE[0]]))
    start = ["distill", "--model", str(tmp_path / "model"), "--out", str(out), "--prompts", str(questions)]
    command = [*start, "--max-new-tokens", "5", "--temperatures", "0", "0.5"]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "dropped: duplicate" in told
    assert "texts" in told
    assert main(command) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert main([*command, "--seed", "3"]) == 2
    assert "was made with seed=0, not 3" in capsys.readouterr().err
    assert main([*start, "--texts", "0"]) == 2
    assert "texts must be at least 1" in capsys.readouterr().err
    few = ["--texts", "3", "--max-new-tokens", "5", "--prompt-tokens", "24"]
    assert main(["distill", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "own"), *few]) == 0
    assert json.loads((tmp_path / "own" / "manifest.json").read_text())["settings"]["self_prompt"] is True


def test_other_verbs_may_name_some_fields_themselves():
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=5)
    add_distill_options(parser, without=("seed", "batch"))
    config = from_fields(parser.parse_args(["--texts", "7"]), DistillConfig, batch=2)
    assert config == DistillConfig(texts=7, seed=5, batch=2)


def test_scratch_files_are_the_only_ones_removed(tmp_path):
    for name in (".texts-00003.safetensors.part", ".manifest.json.part", ".other.part", "texts-00000.safetensors"):
        (tmp_path / name).write_text("")
    texts.remove_scratch(tmp_path)
    assert sorted(files(tmp_path)) == [".other.part", "texts-00000.safetensors"]


def test_a_second_writer_is_refused(target, tmp_path):
    with only_writer(tmp_path / "data"):
        with pytest.raises(ConfigError, match=r"another process writes to .*data: wait"):
            distill(target, tmp_path / "data", SMALL, prompts=FILE)
        assert files(tmp_path / "data").keys() <= {".lock"}
    assert distill(target, tmp_path / "data", SMALL, prompts=FILE).rows == 4


def test_the_lock_of_a_killed_writer_is_free(tmp_path):
    hold = "import sys; from pathlib import Path; from redrafter.train.lock import only_writer\n"
    hold += "with only_writer(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process"), only_writer(tmp_path):
            pass
    finally:
        child.kill()
        child.communicate()
    with only_writer(tmp_path):
        pass


def test_a_folder_in_which_nothing_was_written_goes_again(tmp_path):
    with only_writer(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RedrafterError, match="cannot write to"), only_writer(tmp_path / "file" / "new"):
        pass


def test_wrong_arguments(target, tmp_path):
    for call, says in (
        (lambda: distill(5, tmp_path, SMALL), "target must be of type Target, got 5"),
        (lambda: distill(target, str(tmp_path), SMALL), "folder must be of type Path, got '"),
        (lambda: distill(target, tmp_path, {}), "config must be of type DistillConfig, got {}"),
        (lambda: distill(target, tmp_path, SMALL, prompts="abc"), "prompts must be a list, got 'abc'"),
        (lambda: distill(target, tmp_path, SMALL, prompts=[b"a"]), "prompts[0] must be text, got b'a'"),
        (lambda: distill(target, tmp_path, SMALL, documents=5), "documents must be a list, got 5"),
        (lambda: distill(target, tmp_path, SMALL, self_prompt="no"), "self_prompt must be true or false, got 'no'"),
        (lambda: distill(target, tmp_path, SMALL, self_prompt=True, clock=9), "clock must be of type Clock, got 9"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert says in str(error.value)
    assert not list(tmp_path.iterdir())
