"""Odd values, odd paths, odd bytes and outputs that cannot be written: one line, and no traceback."""

import io
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table

from redrafter.cli import bench
from redrafter.cli.console import Console
from redrafter.cli.main import READER_GONE, VERBS, main, parser
from redrafter.engine.request import Part, Stats
from tests.helpers.letters import END, tokenizer
from tests.helpers.zoo import make_model

HUGE = ("99999999999999999999", "9" * 9999, "1e999", "nan", "inf", "-inf", "", "x", "\udcff", "[/b]")
QUESTIONS = "benchmarks/data/mt_bench.jsonl"
NEEDED = {
    "generate": ["hi"],
    "eval": ["--questions", QUESTIONS],
    "train": ["--out", "x"],
    "distill": ["--out", "x"],
    "transcribe": ["x.wav"],
    "export": ["x", "--to", "apple", "--out", "x"],
    "quantize": ["--to", "int4", "--out", "x"],
    "bench run": ["--suite", "mt_bench"],
    "bench report": ["x"],
    "bench sampling": ["summaries", "--data", "x"],
}
"""Arguments that a command cannot do without."""


def number_flags():
    """(command, flag) of every argument that reads a number."""
    for words in [[verb] for verb in VERBS if verb != "bench"] + [["bench", verb] for verb in bench.VERBS]:
        module = import_module(bench.VERBS[words[1]][0] if words[0] == "bench" else f"redrafter.cli.{words[0]}")
        one = parser(None)
        module.add(one)
        for action in one._actions:
            if (
                action.option_strings
                and action.metavar not in ("FILE", "FOLDER", "JSON", "SVG")
                and action.type is not None
            ):
                yield " ".join(words), action.option_strings[-1]


NUMBER_FLAGS = sorted(set(number_flags()))
TAKES_TEXT = {"--name", "--tool-parser", "--loss", "--states", "--drafter", "--cell", "--first-state", "--head"}
TAKES_TEXT |= {"--system", "--stop", "--allow-host"}


def refused(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1, err
    assert out == ""
    return err


@pytest.mark.parametrize(("command", "flag"), NUMBER_FLAGS)
def test_every_argument_refuses_what_is_no_number(capsys, monkeypatch, command, flag):
    """At once: before the command runs."""
    for name in (*VERBS, *(f"bench_{verb}" for verb in bench.VERBS)):
        monkeypatch.setattr(f"redrafter.cli.{name}.run", lambda args: pytest.fail(f"{args} were accepted"))
    for value in ("\udcff",) if flag in TAKES_TEXT else HUGE:
        if not (value == "99999999999999999999" and flag in FLOATS):
            assert flag in refused(capsys, *command.split(), *NEEDED.get(command, []), f"{flag}={value}"), value


FLOATS = {
    "--delta", "--epsilon", "--temperature", "--repetition-penalty", "--presence-penalty", "--frequency-penalty",
    "--pressure", "--temperatures", "--lr", "--clip", "--depth-decay", "--feature-loss", "--weight-decay",
}  # fmt: skip
"""1e20 is a number like others here."""


FOLDER, FILE = "tests/cli", __file__
PATHS = [
    ("train", ["--out", FILE], "--out: "),
    ("train", ["--out", f"{FILE}/below"], "--out: "),
    ("train", ["--out", "x", "--data", FILE], "--data: "),
    ("train", ["--out", "x", "--init-from", FILE], "--init-from: "),
    ("train", ["--out", ""], "--out is empty"),
    ("train", ["--out", "x" * 999], "--out: "),
    ("train", ["--out", "x", "--prompts", FOLDER], "--prompts: "),
    ("distill", ["--out", FILE], "--out: "),
    ("distill", ["--out", "x", "--text", FOLDER], "--text: "),
    ("tune", ["--prompts", FOLDER], "--prompts: "),
    ("eval", ["--questions", FOLDER], "--questions: "),
    ("eval", ["--questions", "nowhere"], "--questions: there is no file nowhere"),
    ("eval", ["--questions", QUESTIONS, "--save", FOLDER, "--overwrite"], "--save: "),
    ("compare", ["--save", f"{FILE}/below"], "--save: "),
    ("generate", ["--json-schema", FOLDER, "hi"], FOLDER),
    ("generate", ["--drafter", FILE, "hi"], "is a file"),
    ("export", [FILE, "--to", "apple", "--out", "x"], "is a file"),
    ("export", ["x", "--to", "apple", "--out", FILE], "--out: "),
    ("quantize", ["x", "--to", "int4", "--out", FILE], "--out: "),
    ("transcribe", [FOLDER], FOLDER),
    ("bench", ["run", "--suite", FOLDER], FOLDER),
    ("bench", ["run", "--suite", "mt_bench", "--out", FILE], "--out: "),
    ("bench", ["report", FILE], "runs: "),
    ("bench", ["report", FOLDER, "--results", FOLDER], "--results: "),
    ("bench", ["report", FOLDER, "--out", FOLDER], "--out: "),
    ("bench", ["serve", "--plot", FOLDER, "--overwrite"], "--plot: "),
]


@pytest.mark.parametrize(("verb", "arguments", "says"), PATHS)
def test_a_file_for_a_folder_and_a_folder_for_a_file(capsys, verb, arguments, says):
    assert says in refused(capsys, verb, *arguments)


EVERY = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["bench", "run", "--help"]]


@pytest.mark.parametrize("buffering", [-1, 1], ids=["buffered", "by line"])
@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_a_full_disk_is_one_line(capsys, monkeypatch, words, buffering):
    with open("/dev/full", "w", buffering=buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(words) == 2
    assert capsys.readouterr().err == "redrafter: cannot write: No space left on device\n"


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_a_reader_that_has_gone_is_silent(capsys, monkeypatch, words):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(words) == READER_GONE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("lost", ["full", "closed"])
def test_a_server_that_cannot_say_where_it_is_ends(capsys, monkeypatch, tmp_path, lost):
    make_model(eos_token_id=END).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    words = ["serve", "--model", str(tmp_path), "--device", "cpu", "--rows", "1", "--context", "32", "--port", "0"]
    with open(writing, "w") as pipe, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full if lost == "full" else pipe)
        assert main(words) == (2 if lost == "full" else READER_GONE)
    assert capsys.readouterr().err == ("redrafter: cannot write: No space left on device\n" if lost == "full" else "")


@pytest.mark.parametrize(
    ("lost", "code", "says"),
    [(">/dev/full", 2, "redrafter: cannot write: No space left on device\n"), ("|true", READER_GONE, "")],
)
def test_nothing_is_said_twice_when_the_process_ends(lost, code, says):
    """The interpreter writes what is left of the output at its end."""
    command = f"({sys.executable} -m redrafter bench run --help; echo $? >&2) {lost}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == f"{says}{code}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "2>/dev/full"])
def test_a_stream_that_is_closed(closed):
    words = "generate -" if closed == "<&-" else "--version" if closed == ">&-" else "no-verb"
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m redrafter {words} {closed}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if closed == ">&-" else 2)
    assert done.stderr == ("redrafter: the prompt is empty\n" if closed == "<&-" else "")


def test_an_output_that_fails_inside_rich(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Console(file=Full()).print("x")


@pytest.mark.parametrize("name", ["[/b]", "[bold]x", ":cat:", "[link=x]"])
def test_names_are_printed_as_they_are(name):
    out = io.StringIO()
    console = Console(file=out, width=200)
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(name)
    console.note(name)
    console.print(table)
    assert out.getvalue().count(name) == 5


class Echo:
    """An engine that repeats the last turn."""

    recorded = False
    target = SimpleNamespace(tokenizer=None)

    def stream(self, prompts, **options):
        yield Part(0, prompts[0][-1]["content"], [1], 0, Stats(rule="seeded", lossless=True), "stop")


def test_chat_leaves_out_a_line_that_is_not_utf8(capsys, monkeypatch):
    monkeypatch.setattr("redrafter.cli.chat.load_engine", lambda args: Echo())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nhello\n"), encoding="utf-8"))
    assert main(["chat"]) == 0
    out = capsys.readouterr().out
    assert "the line is not utf-8 text and is left out" in out
    assert "you: hello\n" in out


def test_no_command_prints_through_a_console_that_reads_markup():
    for path in Path("src/redrafter/cli").glob("*.py"):
        if path.name != "console.py":
            assert "rich.console import Console" not in path.read_text(), path
