"""What a long command prints where its output is no terminal: a plain line at least every ten seconds."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from redrafter.cli import progress
from redrafter.cli.live import LiveTraining
from redrafter.cli.main import main

CLI = Path(progress.__file__).parent


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    assert progress.EVERY <= 10
    monkeypatch.setattr(progress, "EVERY", 0.02)


def lines(work, **console) -> list[str]:
    out = io.StringIO()
    work(Console(file=out, width=40, **console))
    return out.getvalue().splitlines()


def wait_for(console: Console, words: str) -> None:
    deadline = time.monotonic() + 10
    while words not in console.file.getvalue():
        assert time.monotonic() < deadline, console.file.getvalue()
        time.sleep(0.01)


def test_what_waits_says_so():
    def work(console):
        with progress.waiting(console, "loading") as say:
            wait_for(console, "loading, 0 s")
            say("a line that is much longer than the console is wide")
            wait_for(console, "much longer")

    found = lines(work)
    assert re.fullmatch(r"a line that is much longer than the console is wide, \d s", found[-1])


def test_a_bar_says_how_far_it_is():
    def work(console):
        with progress.progress_bar(console, transient=True) as bar:
            task = bar.add_task("writing texts", total=4, speed="")
            bar.update(task, advance=3, speed="7 tokens/s")
            wait_for(console, "writing texts: 3 of 4, 7 tokens/s, 0 s")

    assert lines(work)


def test_stages_say_which_one():
    def work(console):
        with progress.stages(console) as report:
            report("one", 2, 2)
            report("two", 1, 3)
            wait_for(console, "two: 1 of 3, 0 s")

    assert lines(work)


def test_training_says_where_it_is():
    def work(console):
        with LiveTraining(30, console) as live:
            wait_for(console, "training: update 0 of 30, 0 s")
            live.training({"update": 7, "loss": 2.5})
            wait_for(console, "training: update 7 of 30, loss 2.500, 0 s")

    assert lines(work)


@pytest.mark.parametrize("console", [{"force_terminal": True}, {"quiet": True}], ids=["terminal", "quiet"])
def test_a_terminal_and_a_quiet_process_get_no_lines(console):
    def work(console):
        with progress.plain_lines(console, lambda: "words"):
            time.sleep(0.1)

    assert lines(work, **console) == []


def test_an_output_that_fails_ends_the_lines_alone():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError("no space left")

    with progress.plain_lines(Console(file=Full()), lambda: "words"):
        time.sleep(0.1)


@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda p: p.name)
def test_every_command_uses_this_helper(path):
    """rich's own bars and spinners print nothing until their end where there is no terminal."""
    text = path.read_text()
    if path.name != "progress.py":
        assert not re.search(r"\bProgress\((?!\*)|\.status\(|\btrack\(", text.replace("self._progress = Progress(", ""))


def test_a_command_prints_lines_to_a_pipe(capsys, monkeypatch):
    from redrafter.cli import doctor

    def slow():
        time.sleep(0.2)
        return []

    monkeypatch.setattr(doctor, "installation", slow)
    monkeypatch.setattr(doctor, "storage", list)
    monkeypatch.setattr(doctor, "run_findings", lambda args: [])
    assert main(["doctor"]) == 0
    assert "checking, 0 s" in capsys.readouterr().err
