"""Every benchmark script runs: `--smoke`, with tiny random models, in this process."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import step_picture
from benchmarks.common import HERE
from benchmarks.tables import drafters

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in Triton's interpreter, warns of every log of 0
    pytest.mark.filterwarnings("ignore:.*FP_FUSION.*"),  # Triton, of a default that will change
]

MEASURING = (
    "ablations",
    "attention",
    "cpu",
    "drafter",
    "engines_gpu",
    "equality",
    "exact_gpu",
    "exports",
    "formats",
    "gather",
    "gpu",
    "ngram_odds",
    "own_gpu",
    "packing",
    "past_answers",
    "peers",
    "planned",
    "quantize",
    "rules",
    "serve_equality",
    "speech",
    "structured",
    "table1",
    "texts",
    "verify_kernel",
)
"""Scripts that write a results file."""
TABLES = {"ablations": drafters.ablations, "peers": drafters.peers, "table1": drafters.table1}
"""Tables of results whose columns depend on the options of a run."""
TRAINING = ("layers_drafter", "speech_drafter")
"""Scripts that write a drafter."""
DRAWING = ("step_picture",)
"""Scripts that draw a picture."""
SLOW = ("architectures", "cpu_demo", "serve", "serve_start", "server_attack")
"""Scripts that start another process."""
ELSEWHERE = ("mlx_cpu", "originals", "readme", "vllm_cpu")
"""Tested by tests/docs/test_readme.py; where MLX or vLLM is installed by redrafter-mlx/tests/test_benchmark.py and
tests/interop/test_vllm.py. `originals` needs checkouts of other projects; tests/interop/test_published.py reads what it
made."""


def run(name: str, *words: object) -> None:
    importlib.import_module(f"benchmarks.{name}").main(["--smoke", *map(str, words)])


def check_results(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["rows"]
    assert all(isinstance(value, float | int) for value in result["headline"].values())


@pytest.mark.parametrize("name", MEASURING)
def test_measures(name: str, tmp_path: Path) -> None:
    run(name, "--save", tmp_path / "result.json")
    check_results(tmp_path / "result.json")
    if name in TABLES:
        assert TABLES[name](json.loads((tmp_path / "result.json").read_text())).startswith("| ")


def test_measures_an_engine_without_seeds(tmp_path: Path) -> None:
    """vLLM draws its own random numbers, so that greedy texts alone are compared."""
    run("engines_gpu", "--engine", "vllm", "--parts", "small", "--save", tmp_path / "result.json")
    check_results(tmp_path / "result.json")
    assert {row["texts"] for row in json.loads((tmp_path / "result.json").read_text())["rows"]} == {"greedy"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_measures_with_another_process(name: str, tmp_path: Path) -> None:
    run(name, "--save", tmp_path / "result.json")
    check_results(tmp_path / "result.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ablations", "peers", "texts"])
def test_measures_its_parts_at_once(name: str, tmp_path: Path) -> None:
    run(name, "--at-once", "--out", tmp_path / "out", "--save", tmp_path / "result.json")
    check_results(tmp_path / "result.json")
    assert (
        len(json.loads((tmp_path / "result.json").read_text())["rows"])
        == {"ablations": 2, "peers": 3, "texts": 4}[name]
    )


@pytest.mark.slow
def test_simulates_suites_at_once(tmp_path: Path) -> None:
    apart, at_once = tmp_path / "apart.json", tmp_path / "at_once.json"
    run("drafter", "--suites", "mt_bench", "gsm8k", "--limit", 1, "--save", apart)
    words = ("--suites", "mt_bench", "gsm8k", "--limit", 1, "--answers", tmp_path / "answers", "--at-once")
    run("drafter", *words, "--save", at_once)
    check_results(at_once)
    wanted, got = (json.loads(path.read_text()) for path in (apart, at_once))
    assert got["headline"] == wanted["headline"]
    assert got["rows"] == wanted["rows"]


@pytest.mark.parametrize("words", [(), ("--answers", "answers", "--resume")], ids=["no answers", "resume"])
def test_suites_at_once_need_a_folder_and_cannot_resume(words: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("drafter", "--at-once", *words)
    assert stopped.value.code == 2
    assert "--at-once needs --answers, and cannot resume" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["layers", "recurrent"])
def test_trains_a_speech_drafter(kind: str, tmp_path: Path) -> None:
    run("speech_drafter", "--kind", kind, "--out", tmp_path / "drafter")
    assert (tmp_path / "drafter" / "model.safetensors").stat().st_size


def test_trains_a_layer_drafter(tmp_path: Path) -> None:
    run("layers_drafter", "--out", tmp_path / "drafter")
    assert (tmp_path / "drafter" / "model.safetensors").stat().st_size


def test_draws_a_step(tmp_path: Path) -> None:
    run("step_picture", "--out", tmp_path / "step.svg")
    for file in (tmp_path / "step.svg", HERE.parent / "docs" / "step.svg"):
        assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_a_drawn_step_keeps_what_it_says() -> None:
    """A tree of two branches: `b` and `d` are kept, `c` is dropped and sees the root alone besides itself."""
    step = step_picture.Step("so far", ["a", "b", "c", "d"], [0, 0, 0, 1], [0, 1, 3], "e")
    assert [step.ancestors(node) for node in range(4)] == [{0}, {0, 1}, {0, 2}, {0, 1, 3}]
    assert (step.depths, step_picture.places(step)) == ([0, 1, 1, 2], [0, 0, 1, 0])
    assert "checks 3 guesses" in step_picture.summary(step)
    assert "keeps the 2 that" in step_picture.summary(step)
    picture = step_picture.drawn(step)
    assert picture.count(f'fill="{step_picture.KEPT}" stroke') == 2
    assert step_picture.drawn(replace(step, path=[0, 2])).count(f'fill="{step_picture.KEPT}" stroke') == 1


def test_every_script_is_listed() -> None:
    scripts = {path.stem for path in HERE.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert scripts == {*MEASURING, *TRAINING, *DRAWING, *SLOW, *ELSEWHERE}


def test_packing_counts_the_nodes_of_real_trees(tmp_path: Path) -> None:
    """The trees of a beam of 3 candidates of 4 tokens have 4 to 12 nodes, one tree for each step."""
    run("packing", "--widths", 3, "--length", 4, "--tokens", 8, "--save", tmp_path / "packing.json")
    (row,) = json.loads((tmp_path / "packing.json").read_text())["rows"]
    assert row["before"] == 12
    assert 4 <= row["after_p1"] <= row["after_mean"] <= row["after_p99"] <= 12
    assert row["steps"] >= 1
    assert row["tokens_per_step"] > 1, "the target drafts for itself"


def test_a_suite_is_added_to_results_of_another_run(tmp_path: Path) -> None:
    """`benchmarks/drafter.py --suites alpaca_eval --resume`: the file keeps its facts, new rows carry their own."""
    save, more = tmp_path / "result.json", tmp_path / "more.jsonl"
    more.write_text(json.dumps({"question_id": 9, "category": "other", "turns": ["Where is it?"]}) + "\n")
    run("drafter", "--temperatures", 0, "--save", save)
    before = json.loads(save.read_text()) | {"commit": "of another run"}
    save.write_text(json.dumps(before))
    run("drafter", "--suites", more, "--temperatures", 0, "--resume", "--save", save)
    after = json.loads(save.read_text())
    new = [row for row in after["rows"] if row not in before["rows"]]
    assert after["rows"][: len(before["rows"])] == before["rows"]
    assert {row["suite"] for row in new} == {"more"}
    assert after["commit"] == "of another run"
    assert {row["run"]["commit"] == "of another run" for row in new} == {False}
    assert set(after["headline"]) > set(before["headline"])
    run("drafter", "--suites", more, "--temperatures", 0, "--resume", "--save", save)
    assert json.loads(save.read_text()) == after, "nothing was left to measure"


@pytest.mark.slow
def test_a_script_runs_as_a_file(tmp_path: Path) -> None:
    """`python benchmarks/gather.py`, besides the import of the package that the tests above use."""
    words = [sys.executable, "benchmarks/gather.py", "--smoke", "--save", str(tmp_path / "result.json")]
    subprocess.run(words, cwd=HERE.parent, check=True, capture_output=True)
    check_results(tmp_path / "result.json")


@pytest.mark.parametrize("name", [*MEASURING, *TRAINING, *DRAWING, *SLOW, *ELSEWHERE])
def test_every_script_finds_the_package(name: str) -> None:
    """Python puts only the script's own folder on the path."""
    assert "if not __package__:" in (HERE / f"{name}.py").read_text()
