"""The page of a run: well-formed, complete, and opened by a real browser without a word of complaint."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import pytest

from redrafter.bench.report import markdown, page
from redrafter.bench.statistics import summaries
from redrafter.bench.studies import figures
from redrafter.cli.main import main
from tests.bench.test_bench import record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FACTS = {"hash": "abc", "command": "redrafter bench run", "config": {"suite": "s <&> t"}, "environment": {}}
PACKING = {
    "hardware": {"cpu": "some"},
    "rows": [
        {"width": w, "before": 5 * w, "after_mean": 4.0 * w, "after_p1": 3 * w, "after_p99": 5 * w} for w in (2, 4, 8)
    ]
    + [{"part": "batch", "width": w, "rows": r, "tokens_per_second": w * r} for w in (1, 2) for r in (1, 4)],
}
STUDIES = {
    "hardware": {"gpu": "some"},
    "rows": [{"drafter": d, "held_out": {"accuracy": [0.5, 0.4]}} for d in ("medusa", "recurrent")]
    + [{"drafter": "plain", "tokens_per_second": 100.0}]
    + [
        {"rule": r, "temperature": t, "tokens_per_step": 2.0, "more_than_plain": 0.1 if r == "typical" else -0.05}
        for r in ("plain", "seeded", "typical")
        for t in (0.1, 0.9)
    ],
}
"""Rows of every script, in one file; made up."""


@pytest.fixture(scope="module")
def records():
    """Two categories, a name with <markup> in it, a grid of beams in two batches, one contender not compared."""
    found = []
    for i in range(6):
        category = "maths & sums" if i % 2 else "writing"
        for batch in (1, 4):
            same = {"category": category, "batch": batch, "rows": batch}
            found.append(record(str(i), "plain", **same))
            for shape, seconds in (("2x3", 0.5), ("4x4:7", 0.4)):
                name = f"recurrent {shape}"
                found.append(record(str(i), name, seconds=seconds + i / 100, accepted=[2, 1, 3, 0], **same))
            found.append(record(str(i), "<b>bold", seconds=1.4, equal=None, **same))
    return found


@pytest.fixture(scope="module")
def html(records):
    return page([(FACTS, records)], [PACKING, STUDIES])


def test_the_page_is_well_formed_and_needs_no_network(html):
    tree = ET.fromstring(html.replace("<!DOCTYPE html>", "", 1))
    assert len(tree.findall(".//figure")) == 2 * 3 + 1 + 2 + 3
    # three for each batch, beams by batch, two of gpu.py and packing.py; depths, two of rules
    assert "nothing measured" not in html
    links = set(re.findall(r"""(?:src|href)=["']([^"']+)|url\(([^)]+)\)|https?://[^"\s<]+""", html))
    assert links <= {("", "")}
    assert set(re.findall(r"https?://[^\"\s<]+", html)) == {"http://www.w3.org/2000/svg"}


def test_the_page_says_what_was_measured(html, records):
    row = next(r for r in summaries(records, "plain") if r["contender"] == "recurrent 4x4:7")
    assert f"{row['speedup']:.2f}× ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})" in html
    assert "not compared" in html
    assert "&lt;b&gt;bold" in html
    assert "<b>bold" not in html.replace("<b>&lt;b&gt;bold", "")


def test_studies_are_drawn_from_their_own_rows():
    """Each point is one that the rows hold, and rows of nothing known draw nothing."""
    drawn = "".join(figures(STUDIES))
    for said in (
        "recurrent, 2: 0.4",
        "seeded, 0.9: -0.05",
    ):
        assert f"<title>{said}</title>" in drawn, said
    assert "plain," not in drawn
    assert figures({"hardware": {}, "rows": [{"drafter": "plain", "tokens_per_second": 1.0}]}) == []


def test_markdown_has_a_table_for_each_setting(records):
    text = markdown(summaries(records, "plain"))
    assert text.count("| contender |") == 2
    assert "**s, T = 0, batch 4**, 6 answers each" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {8}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_opens_it_without_errors(html, tmp_path):
    path = tmp_path / "report.html"
    # Whatever goes wrong is written into the title, which the browser then hands back with the page.
    spy = "<script>window.onerror = e => { document.title = 'ERROR ' + e; };</script>"
    shapes = "document.querySelectorAll('svg rect, svg path, svg circle').length"
    count = f"<script>document.title = 'drawn ' + {shapes};</script>"
    path.write_text(html.replace("<style>", spy + "<style>", 1).replace("</body>", count + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert title[1].startswith("drawn ")
    assert int(title[1].split()[1]) > 50
    assert "CONSOLE" not in done.stderr, "the browser complained"
    shot = tmp_path / "page.png"
    subprocess.run(
        [*command, f"--screenshot={shot}", "--window-size=1200,1600", path.as_uri()],
        capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    assert shot.stat().st_size > 20_000


def test_reports_of_nothing_are_refused(tmp_path, capsys):
    assert main(["bench", "report", str(tmp_path)]) == 2
    assert "contains no run of `redrafter bench run`" in capsys.readouterr().err
