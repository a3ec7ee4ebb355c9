"""Hostile command lines: each succeeds, or is refused in one line with exit code 2, or can be interrupted."""

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from argparse import Action
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType

import pytest
import torch

from redrafter import memory
from redrafter.cli import bench
from redrafter.cli.main import INTERRUPTED, READER_GONE, main, parser
from tests.helpers.letters import END, tokenizer
from tests.helpers.zoo import make_model

CASES, PROCESSES = 400, 36
SECONDS, PATIENCE = 3, 60
"""After so many seconds a command is interrupted; after so many more it counts as hanging."""
NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "7",
    "0.5",
    "64",
    "1e3",
    "99999",
    "1000000",
    "99999999",
    str(2**31),
    str(2**63),
    "9" * 99,
)
ODD = (
    "",
    " ",
    "x",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "\udcff",
    "[/b]",
    "[bold]",
    "%s",
    "{}",
    "é",
    "🦜",
    "-",
    "--",
    "../..",
    "\n",
)
PATHS = (
    "missing", "folder", "text.txt", "text.txt/below", "binary.bin", "questions.jsonl", "empty.jsonl", "list.json",
    "deep.json", "/dev/null", "/dev/full", "/nowhere/x", "x" * 999, "folder/config.json", "model", "new",
)  # fmt: skip
SHAPES = ("4x3", "4x3:7", "1x1", "0x0", "1024x256", "99999x99999", "x", "4x", "4x3:0", "-1x2", "4x3:99999999")
JUNK = (["--no-such-option"], ["extra"], ["--"], ["-"], ["--help"], ["--verbos"], ["-x"], ["--="])
MODEL = ["--model", "model", "--device", "cpu"]
FEW = ["--max-new-tokens", "4"]
COMMANDS = {
    "generate": [*MODEL, *FEW, "hello"],
    "chat": [*MODEL, *FEW],
    "compare": [*MODEL, *FEW],
    "eval": [*MODEL, *FEW, "--questions", "questions.jsonl"],
    "tune": [*MODEL],
    "train": [
        *MODEL,
        *FEW,
        "--out",
        "new",
        "--texts",
        "4",
        "--updates",
        "2",
        "--tasks",
        "0",
        "--prompts",
        "questions.jsonl",
    ],
    "distill": [*MODEL, *FEW, "--out", "new", "--texts", "4", "--tasks", "0", "--prompts", "questions.jsonl"],
    "serve": [*MODEL, "--rows", "2", "--context", "64", "--port", "0"],
    "transcribe": ["binary.bin"],
    "export": ["folder", "--to", "apple", "--out", "new"],
    "quantize": ["model", "--to", "int4", "--out", "new"],
    "doctor": [],
    "bench run": [*MODEL, *FEW, "--suite", "questions.jsonl", "--contenders", "ngram"],
    "bench report": ["folder"],
    "bench sampling": ["summaries", "--data", "questions.jsonl", *MODEL],
    "bench serve": ["--url", "http://127.0.0.1:9"],
}


class Hangs(BaseException):
    """A command did not end when it was interrupted."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a tiny model and odd files, as the current one."""
    folder = tmp_path_factory.mktemp("lines")
    make_model("llama", torch.float32, eos_token_id=END).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").write_text('{"model_type": "redrafter_recurrent", "drafter": []}')
    (folder / "text.txt").write_text("some words\n\nand more of them\n")
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "questions.jsonl").write_text('{"question_id": 1, "category": "a", "turns": ["hello you", "why"]}\n' * 2)
    (folder / "empty.jsonl").write_text("")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "deep.json").write_text("[" * 50_000)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def options(command: str) -> list[Action]:
    first, _, second = command.partition(" ")
    one = parser(None)
    import_module(bench.VERBS[second][0] if second else f"redrafter.cli.{first}").add(one)
    return [action for action in one._actions if action.option_strings and action.dest not in ("help", "version")]


def value(action: Action, rng: random.Random) -> str:
    """One that might be meant, or any."""
    kind = rng.random()
    if action.choices and kind < 0.7:
        return str(rng.choice(list(action.choices)))
    if action.metavar in ("FILE", "FOLDER", "JSON", "SVG") and kind < 0.8:
        return rng.choice(PATHS)
    if action.metavar in ("N", "X") and kind < 0.8:
        return rng.choice(NUMBERS)
    return rng.choice(rng.choice((NUMBERS, ODD, PATHS, SHAPES)))


def line(known: dict[str, list[Action]], rng: random.Random) -> list[str]:
    command = rng.choice(list(COMMANDS))
    words = [*command.split(), *COMMANDS[command]]
    for action in rng.sample(known[command], min(len(known[command]), rng.randint(0, 3))):
        words.append(rng.choice(action.option_strings))
        if action.nargs != 0:
            words += [value(action, rng) for _ in range(rng.choice((1, 1, 1, 1, 2)) if action.nargs == "+" else 1)]
    if rng.random() < 0.1:
        words += rng.choice(JUNK)
    if rng.random() < 0.1:
        del words[rng.randrange(len(words))]
    return [word for word in words if word != "--verbose"]


def lines(count: int, seed: int) -> list[list[str]]:
    rng, known = random.Random(seed), {command: options(command) for command in COMMANDS}
    return [line(known, rng) for _ in range(count)]


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """As if a user pressed Ctrl-C after some seconds."""

    def later(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, hang)
        signal.alarm(PATIENCE)
        raise KeyboardInterrupt

    def hang(number: int, frame: FrameType | None) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, later)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(code: int, out: str, err: str, reader_gone: bool = False) -> str:
    """What came of it; anything but these four is a failure."""
    told = [text for text in err.splitlines() if text.startswith("redrafter: ")]
    if "Traceback" in out + err:
        return "traceback"
    if code == 2 and len(told) == 1 and err.splitlines()[-1] == told[0]:
        return "refused"
    if code == READER_GONE and reader_gone and not told:
        return "reader gone"
    return {0: "done", INTERRUPTED: "interrupted"}.get(code, f"exit code {code}")


GOOD = {"refused", "done", "interrupted", "reader gone"}


@pytest.mark.fuzz
def test_command_lines_in_one_process(place, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2.0**30)
    monkeypatch.setattr(
        "redrafter.serve.server.Server.run", lambda self: self.ready() if hasattr(self, "ready") else None
    )
    monkeypatch.setattr("redrafter.kernels.threads.use_threads", lambda threads: None)
    counts: Counter[str] = Counter()
    bad, began, slowest = [], time.monotonic(), 0.0
    for words in lines(CASES, seed=1):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n\xe9\n")))
        start = time.monotonic()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), interrupted():
                result = outcome(main(words), out.getvalue(), err.getvalue())
        except SystemExit as ended:
            result = "done" if ended.code in (0, None) else f"exit {ended.code}"
        except KeyboardInterrupt:
            result = "interrupted"  # while the last command's streams were put away
        except Hangs:
            result = "hang"
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        slowest = max(slowest, time.monotonic() - start)
        counts[result if result in GOOD else "bad"] += 1
        if result not in GOOD:
            bad.append((words, result[:300], err.getvalue()[-500:]))
    print(f"\n{CASES} command lines in {time.monotonic() - began:.0f} s, slowest {slowest:.1f} s: {dict(counts)}")
    for one in bad:
        print(one)
    assert not bad
    assert counts["refused"] > CASES / 3
    assert counts["done"] > CASES / 20


@pytest.mark.fuzz
def test_command_lines_in_processes(place):
    """Also with a full disk and a closed pipe as standard output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    counts: Counter[str] = Counter()
    bad, began = [], time.monotonic()
    for number, words in enumerate(lines(PROCESSES, seed=2)):
        kind = ("pipe", "full", "closed")[number % 3]
        run = [sys.executable, "-m", "redrafter", *words]
        reading, writing = os.pipe()
        with (
            open("/dev/full", "w") as full,
            open(reading) as source,
            open(writing, "w") as sink,
            open("stdout", "w+") as shown,
            open("stderr", "w+") as said,
        ):
            source.close()
            stdout = {"pipe": shown, "full": full, "closed": sink}[kind]
            process = subprocess.Popen(run, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=said)
            try:
                process.wait(10 * SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        result = outcome(
            process.returncode,
            Path("stdout").read_text(errors="replace"),
            Path("stderr").read_text(errors="replace"),
            kind == "closed",
        )
        counts[result if result in GOOD else "bad"] += 1
        if result not in GOOD:
            bad.append((kind, words, result, Path("stderr").read_text(errors="replace")[-800:]))
    print(f"\n{PROCESSES} processes in {time.monotonic() - began:.0f} s: {dict(counts)}")
    for one in bad:
        print(one)
    assert not bad
    assert counts["refused"] > PROCESSES / 3


def test_a_traceback_and_a_second_line_are_noticed():
    assert outcome(2, "", "redrafter: no\n") == "refused"
    assert outcome(2, "", "Traceback (most recent call last):\nredrafter: no\n") not in GOOD
    assert outcome(2, "", "redrafter: no\nmore\n") not in GOOD
    assert outcome(2, "", "") not in GOOD
    assert outcome(1, "", "redrafter: no\n") not in GOOD
    assert outcome(READER_GONE, "", "") not in GOOD
