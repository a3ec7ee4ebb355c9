"""What a training run shows and leaves behind: the journal, the report, the terminal."""

import io
import json
import logging
import sys
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from redrafter.cli.live import LiveTraining
from redrafter.train import journal as module
from redrafter.train.journal import Journal, best, read_journal
from redrafter.train.report import write_report

SVG = "{http://www.w3.org/2000/svg}"
NAN = float("nan")


def training(update, loss=2.5):
    return {
        "update": update,
        "loss": loss,
        "accuracy": [0.62, 0.45, 0.33],
        "lr": 3e-4,
        "positions_per_second": 14200.0,
        "seconds": 1.5,
    }


def held_out(update, tokens_per_step):
    return {"update": update, "held_out": {"tokens_per_step": tokens_per_step, "accuracy": [0.6, 0.4], "loss": 2.4}}


@pytest.fixture
def no_board(monkeypatch):
    """As if TensorBoard were not installed."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    module.say_how_to_get_it.cache_clear()


@pytest.fixture
def filled(tmp_path, no_board):
    with Journal(tmp_path) as journal:
        for update in range(1, 7):
            journal.write(training(update))
            if update % 2 == 0:
                journal.write(held_out(update, 1 + update / 10))
    return tmp_path


def test_every_line_is_on_disk_at_once(tmp_path, no_board):
    with Journal(tmp_path / "new" / "run") as journal:
        journal.write(training(1))
        assert read_journal(tmp_path / "new" / "run") == journal.records == [training(1)]


def test_resuming_forgets_what_came_after_the_checkpoint(filled):
    with Journal(filled, after=4) as journal:
        assert [r["update"] for r in journal.records] == [1, 2, 2, 3, 4, 4]
        journal.write(training(5))
    assert [r["update"] for r in read_journal(filled)] == [1, 2, 2, 3, 4, 4, 5]
    assert not list(filled.glob("*.part"))


def test_resuming_drops_a_half_written_line(filled):
    path = filled / "journal.jsonl"
    path.write_text(path.read_text() + '{"update": 6, "lo')
    with Journal(filled, after=6) as journal:
        journal.write(training(7))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7]


def test_a_bad_line_in_the_middle_is_left_out_and_said(filled, caplog):
    path = filled / "journal.jsonl"
    path.write_text("[1]\n" + path.read_text())
    assert len(read_journal(filled)) == 9
    assert "journal.jsonl:1" in caplog.text


def test_a_new_run_in_an_old_folder_begins_empty(filled):
    with Journal(filled) as journal:
        assert journal.records == read_journal(filled) == []


def test_the_journal_is_strict_json(tmp_path, no_board):
    with Journal(tmp_path) as journal:
        journal.write(training(1, loss=NAN))
    assert json.loads((tmp_path / "journal.jsonl").read_text(), parse_constant=pytest.fail)["loss"] is None


def test_best_is_the_first_of_the_highest():
    assert best([training(1), held_out(2, NAN), held_out(3, 1.5), held_out(4, 1.5), held_out(5, None)]) == (3, 1.5)
    assert best([training(1)]) is None


def test_without_tensorboard_it_is_said_once(tmp_path, no_board, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(2):
        Journal(tmp_path).close()
    assert caplog.text.count("pip install tensorboard") == 1
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_has_the_same_figures(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Journal(tmp_path) as journal:
        for update in (1, 2, 3):
            journal.write(training(update, loss=float(update)))
    with Journal(tmp_path, after=2) as journal:
        journal.write(training(3, loss=7.0))
        journal.write(held_out(3, 2.25))
        journal.write(training(4, loss=NAN))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("training/loss")] == [(1, 1.0), (2, 2.0), (3, 7.0)]
    assert [e.value for e in events.Scalars("held_out/tokens_per_step")] == [2.25]
    assert events.Scalars("training/accuracy/depth_2")[0].value == pytest.approx(0.45)


def parsed(folder, facts=()):
    """The page as a tree: it is well-formed XML, so any parser of HTML reads it the same way."""
    content = write_report(folder, dict(facts)).read_text()
    for outside in ("http://", "https://", "<script", "@import", "url("):
        assert outside not in content.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "nan" not in content.lower().replace("nano", "")
    assert not list(folder.glob("*.part"))
    return ET.fromstring(content), content


def test_the_report_shows_curves_and_facts(filled):
    tree, content = parsed(filled, {"target": "a <model> & 'more'", "parameters": 12_345_678, "layers": (2, None)})
    charts = tree.findall(f".//{SVG}svg")
    assert len(charts) == 6
    assert all(chart.findall(f"{SVG}path") for chart in charts)
    assert "1.60 tokens/step" in content
    assert "best at update 6 of 6" in content
    marks = [t.text for t in tree.iter(f"{SVG}text") if t.get("class") == "mark"]
    assert marks == ["1.60"]
    titles = [t.text for t in tree.iter(f"{SVG}title")]
    assert "update 4\ntokens/step 1.4" in titles
    assert "update 2\ndepth 1 0.62\ndepth 2 0.45\ndepth 3 0.33" in titles
    cells = ["".join(cell.itertext()) for cell in tree.iter("td")]
    assert cells == ["a <model> & 'more'", "12,345,678", "2 –"]


def test_a_report_of_nothing(tmp_path):
    _, content = parsed(tmp_path)
    assert content.count("nothing recorded yet") == 6


@pytest.mark.parametrize(
    "records",
    [
        [training(1)],
        [held_out(0, 1.0)],
        [held_out(3, NAN), training(3, NAN), training(4, float("inf")), training(5, 0.0)],
        [training(1, 2.0), training(2, NAN), training(3, 2.0), {"update": 4}, {"update": 5, "accuracy": [None]}],
        [training(1, -3.0) | {"lr": 0.0, "accuracy": []}, {"update": 2, "held_out": {}}],
    ],
)
def test_a_report_of_little(tmp_path, no_board, records):
    with Journal(tmp_path) as journal:
        for record in records:
            journal.write(record)
    parsed(tmp_path)


def test_a_report_of_much_stays_small(tmp_path):
    lines = [json.dumps(training(update, loss=5 + update % 7)) for update in range(1, 20_001)]
    (tmp_path / "journal.jsonl").write_text("\n".join(lines) + "\n")
    _, content = parsed(tmp_path)
    assert len(content) < 250_000


def test_without_a_terminal_an_evaluation_is_one_line():
    out = io.StringIO()
    with LiveTraining(100, Console(file=out, width=40)) as live:
        live.training(training(10))
        live.held_out(held_out(10, 2.25))
        live.training(training(20) | {"accuracy": [0.5] * 7})
        live.held_out(held_out(20, 2.0))
        live.note("saved [last] checkpoint")
    first, second, note = out.getvalue().splitlines()
    assert first == (
        "update 10/100  loss 2.500  accuracy 0.62 0.45 0.33  lr 3.00e-04  positions/s 14,200  "
        "held-out tokens/step 2.25  accuracy 0.60 0.40  best 2.25 at update 10"
    )
    assert "accuracy 0.50 0.50 0.50 0.50 0.50 0.50 …" in second
    assert second.endswith("held-out tokens/step 2.00  accuracy 0.60 0.40  best 2.25 at update 10")
    assert note == "saved [last] checkpoint"


def test_a_terminal_shows_where_the_run_is():
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    with LiveTraining(100, console, records=[held_out(10, 1.5), training(11)]) as live:
        live.note("resumed")
        live.training(training(20))
        live.held_out(held_out(20, 2.25))
        live.held_out(held_out(30, NAN))
    shown = out.getvalue()
    for expected in ("resumed", "20/100", "loss 2.500", "0.62 0.45 0.33", "best 2.25 at update 20", "▁█"):
        assert expected in shown
