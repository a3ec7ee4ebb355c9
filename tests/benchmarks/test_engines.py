"""The parts of benchmarks/engines_gpu.py that need no engine: the client and its processes, the turns, the figures."""

import asyncio
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engines_gpu
from benchmarks.common import HERE
from benchmarks.engines.client import EngineFailed, ProcessWriter, Written
from benchmarks.engines.figures import headline
from benchmarks.engines.kinds import KINDS, PROMPTS, SIZES, Kind, Pair
from benchmarks.engines.process import answer
from benchmarks.engines_gpu import EnginesBenchmark
from benchmarks.tables.engines import SAMPLED, SPEEDS, by_level, engine


class Slow:
    """An engine that takes 20 ms per request and one step per token; it notes how many requests are under way."""

    version = "1"

    def __init__(self, options: dict[str, Any]) -> None:
        self.loop, self.options, self.count = asyncio.new_event_loop(), options, 0
        self.now, self.most = 0, 0

    async def write(self, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        self.count += sampling["max_new_tokens"]
        return prompt[:1] * sampling["max_new_tokens"]

    async def steps(self) -> int:
        return self.count

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.loop.close()


def test_requests_share_the_room_and_come_when_they_arrive() -> None:
    engine = Slow({})
    asked = {"prompts": [[i] for i in range(6)], "sampling": [{"max_new_tokens": 2}] * 6, "concurrency": 2}
    done = answer(engine, asked)
    assert done["texts"] == [[i, i] for i in range(6)]
    assert (engine.most, done["steps"]) == (2, 12)
    assert done["seconds"] >= 0.06
    engine.most = 0
    few = {"prompts": [[i] for i in range(3)], "sampling": [{"max_new_tokens": 2}] * 3, "concurrency": 2}
    late = answer(engine, few | {"arrivals": [0.0, 0.2, 0.4]})
    assert engine.most == 1, "no two requests meet"
    assert late["steps"] == 6, "counted since the question"
    assert all(0.015 < latency < 0.19 for latency in late["latencies"]), "from the arrival, not from the beginning"
    engine.close()


STUB = """
import asyncio, sys
from benchmarks.engines.process import serve

class Stub:
    version = "1"
    def __init__(self, options):
        print("starting", options, flush=True)
        if options.get("broken"):
            raise SystemExit("no such model")
        self.loop, self.options = asyncio.new_event_loop(), options
    async def write(self, prompt, sampling):
        if prompt == [0]:
            sys.exit("out of memory")
        await asyncio.sleep(60 if prompt == [1] else 0)
        return prompt + [sampling["max_new_tokens"]]
    async def steps(self):
        return 0
    def flush(self):
        pass
    def close(self):
        pass

serve(Stub)
"""


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Any]:
    script, made = tmp_path / "stub.py", list[ProcessWriter]()
    script.write_text(STUB)
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}

    def start(patience: float = 20.0, **options: Any) -> ProcessWriter:
        made.append(ProcessWriter(script, options, environment, tmp_path / f"stub-{len(made)}.log", patience))
        return made[-1]

    yield start
    for writer in made:
        writer.close()
        assert writer.process.returncode is not None


def test_an_engine_in_another_process_answers_and_its_failures_are_told(stub: Any) -> None:
    writer = stub()
    sampling = [{"max_new_tokens": 7}] * 2
    assert writer.write([[3], [4]], sampling, 2).texts == [[3, 7], [4, 7]]
    assert writer.write([[5], [6]], sampling, 1, [0.0, 0.01]).texts == [[5, 7], [6, 7]]
    with pytest.raises(EngineFailed, match=r"the engine ended(.|\n)*starting(.|\n)*out of memory"):
        writer.write([[0]], sampling[:1], 1)
    with pytest.raises(EngineFailed, match="the engine ended"):
        writer.write([[3]], sampling[:1], 1)
    with pytest.raises(EngineFailed, match="no such model"):
        stub(broken=True).started()
    silent = stub()
    silent.started()
    silent.patience = 0.2
    with pytest.raises(EngineFailed, match="gave no answer in 0 s"):
        silent.write([[1]], sampling[:1], 1)


def test_vllm_records_steps_of_whole_requests(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = Pair(model=tmp_path, drafter="auto", depth=3, settings={"least": 0.2, "runner": 1})
    plain, speculative = (started.options for started in KINDS["vllm"].options(pair))
    assert plain["compilation_config"]["cudagraph_capture_sizes"] == SIZES
    assert speculative["compilation_config"]["cudagraph_capture_sizes"] == [4 * n for n in SIZES]
    assert speculative["speculative_config"]["num_speculative_tokens"] == 3
    assert speculative["additional_config"] == {"redrafter": {"drafter": "auto", "least": 0.2, "runner": 1}}
    assert plain["kv_cache_memory_bytes"] == 32768 * 3 * 2 * 8 * 2 * 2, "layers, heads, size, keys and values, bf16"
    assert "speculative_config" not in plain
    for mixed, most in ((False, None), (True, 512)):
        pair = Pair(model=tmp_path, drafter="auto", settings={"mixed": mixed})
        chosen = KINDS["vllm"].options(pair)[1].options["compilation_config"]
        assert "cudagraph_capture_sizes" not in chosen, "the plug-in chooses"
        assert chosen.get("max_cudagraph_capture_size") == most
    pair = Pair(model=tmp_path, drafter="auto", settings={"graphs": False})
    eager = KINDS["vllm"].options(pair)[1].options
    assert eager["enforce_eager"]
    assert "compilation_config" not in eager
    assert eager["additional_config"] == {"redrafter": {"drafter": "auto", "graphs": False}}


def test_a_failed_part_leaves_the_others(tmp_path: Path) -> None:
    class Failing(EnginesBenchmark):
        def __init__(self) -> None:
            self.rows, self.settings = [], {}
            self.args = type("Args", (), {"parts": ["own", "wide"], "save": tmp_path / "result.json"})

        def wide(self) -> None:
            raise EngineFailed("the engine ended; the end of log:\nfirst\nlast")

        def own(self) -> None:
            self.rows.append(level("own", 1, 2.0))
            self.save()

    assert not Failing().run()
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["rows"][0]["failed"] == "the engine ended; the end of log:"
    assert saved["rows"][0]["log"] == ["first", "last"]
    assert saved["headline"]["own_ratio_at_1"] == 2.0


class Counting:
    """Writes as many tokens each second as the list says, turn by turn, and texts that depend on the temperature."""

    def __init__(self, name: str, turns: list[str], speeds: list[float]) -> None:
        self.name, self.turns, self.speeds = name, turns, iter(speeds)

    def write(self, prompts: Any, sampling: Any, concurrency: int) -> Written:
        self.turns.append(self.name)
        assert len(prompts) == len(sampling) == 4
        temperature = sampling[0]["temperature"]
        same = [self.name if temperature > 0 and i < 3 else "all" for i in range(4)]
        texts = [[hash(word), concurrency if i == 3 and self.name == "plain" else 2] for i, word in enumerate(same)]
        return Written(texts=texts, seconds=8 / next(self.speeds), steps=4)


class Levels(EnginesBenchmark):
    """A benchmark of which only the levels run."""

    def __init__(self, save: Path) -> None:
        self.rows, self.settings, self.questions, self.began = [], {"backend": "fa3"}, [[1]], time.monotonic()
        given = {"levels": [2, 1], "seconds": 60.0, "requests": 4, "temperatures": [0.0, 1.0], "tokens": 2}
        self.args = Namespace(**given, shape="vicuna-7b", rounds=3, beam="16x5:63", depth=4, save=save)


@pytest.fixture
def four_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_gpu, "TEXTS", 2)


def test_engines_take_turns_and_the_first_round_does_not_count(tmp_path: Path, four_texts: None) -> None:
    benchmark, turns = Levels(tmp_path / "result.json"), list[str]()
    plain = Counting("plain", turns, [1, 100, 100, 50] * 4)
    ours = Counting("ours", turns, [1, 200, 150, 50] * 2 + [1, 400, 300, 100] * 2)
    other = Counting("other", turns, [1, 50, 100, 400] * 4)
    settings = {"adaptive": False}
    benchmark.levels("wide", KINDS["sglang"], plain, ours, [(settings, other)])  # type: ignore[arg-type, list-item]
    assert turns == ["plain", "ours", "other"] * 16
    for row in benchmark.rows:
        times = 2.0 if row["temperature"] else 1.0
        assert row["engine"] == "SGLang 0.5.16, FlashAttention 3"
        assert row["ratios"] == pytest.approx([2.0 * times, 1.5 * times, 1.0 * times])
        assert row["ratio"] == pytest.approx(1.5 * times)
        assert row["plain_tokens_per_s"] == pytest.approx(100)
        (also,) = row["also"]
        assert also["settings"] == {"adaptive": False}
        assert also["ratios"] == pytest.approx([0.5, 1.0, 8.0])
        assert also["tokens_per_s"] == pytest.approx(100)
        # The last plain text depends on the level, and of sampled texts three on the engine.
        parted = {(0.0, 2): [], (0.0, 1): [1], (1.0, 2): [0, 0, 0], (1.0, 1): [0, 0, 0, 1]}
        expected = parted[row["temperature"], row["concurrency"]]
        assert (row["parted_at"], row["equal"]) == (expected, 4 - len(expected))
        assert row["plain_equal_to_first_level"] == (4 if row["concurrency"] == 2 else 3)
    assert [(row["temperature"], row["concurrency"]) for row in benchmark.rows] == [(0, 2), (0, 1), (1, 2), (1, 1)]
    assert json.loads((tmp_path / "result.json").read_text())["headline"]["t1_ratio_at_1"] == pytest.approx(3.0)


def test_sampled_texts_of_an_engine_without_seeds_are_not_compared(tmp_path: Path, four_texts: None) -> None:
    benchmark = Levels(tmp_path / "result.json")
    plain, ours = (Counting(name, [], [1, 100, 100, 100] * 4) for name in ("plain", "ours"))
    benchmark.levels("wide", KINDS["vllm"], plain, ours, [])  # type: ignore[arg-type]
    assert [("equal" in row, row["temperature"]) for row in benchmark.rows] == [(True, 0)] * 2 + [(False, 1)] * 2
    assert {"equal", "t1_ratio_at_1"} <= headline(benchmark.rows).keys()
    assert "t1_equal" not in headline(benchmark.rows)


def test_a_further_contender_that_fails_is_left_out(tmp_path: Path, four_texts: None) -> None:
    class Failing(Counting):
        def write(self, prompts: Any, sampling: Any, concurrency: int) -> Written:
            if len(self.turns) > 8:
                raise EngineFailed("the engine ended; the end of log:\nout of memory")
            return super().write(prompts, sampling, concurrency)

    benchmark, turns = Levels(tmp_path / "result.json"), list[str]()
    plain, ours, other = (Counting(name, turns, [100] * 16) for name in ("plain", "ours", "other"))
    failing = Failing("failing", turns, [100] * 16)
    others = [({"depth": 1}, failing), ({"depth": 2}, other)]
    benchmark.levels("wide", KINDS["vllm"], plain, ours, others)  # type: ignore[arg-type]
    assert turns.count("failing") == 2
    failed, *rows = benchmark.rows
    assert (failed["settings"], failed["log"]) == ({"depth": 1}, ["out of memory"])
    assert len(rows) == 4
    for row in rows:
        assert [also["settings"] for also in row["also"]] == [{"depth": 2}]


def test_every_engine_is_closed_where_one_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[str]()

    class Closing:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    class Benchmark(Levels):
        def pair(self, kind: Any, pair: Pair, name: str) -> Any:
            return Closing("plain"), Closing("ours")

        def write_twin(self) -> None:
            pass

        def other(self, pair: Pair, name: str) -> Any:
            if pair.settings.get("depth") == 2:
                raise OSError("no memory")
            assert pair.settings == {"backend": "fa3", "timing": 5, "depth": 1}
            return Closing(name)

    benchmark = Benchmark(tmp_path / "result.json")
    benchmark.kind, benchmark.args.twin, benchmark.profile = KINDS["sglang"], tmp_path, {"timing": 5}
    benchmark.args.also, benchmark.args.parts = [{"depth": 1}, {"depth": 2}], ["wide"]
    with pytest.raises(OSError, match="no memory"):
        benchmark.wide()
    assert sorted(closed) == ["also-0", "ours", "plain"]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_further_contender_drafts_or_decodes_plainly(
    drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kind, "process", lambda _kind, given, *_rest: given)
    settings = {"backend": "fa3", "drafts": drafts}
    started: Any = KINDS["sglang"].other(Pair(model=tmp_path, drafter="d", settings=settings), tmp_path, "also-0", 1.0)
    assert started.options["attention_backend"] == "fa3"
    assert ("speculative_algorithm" in started.options) == drafts
    expected = {"drafter": "d", "shape": "16x5:63"} if drafts else {}
    assert json.loads(started.variables["REDRAFTER_SGLANG"]) == expected


@pytest.mark.parametrize(
    ("setting", "value", "option", "default"),
    [
        ("backend", "fa3", "attention_backend", "triton"),
        ("batches", [1, 8], "cuda_graph_bs_decode", SIZES),
        ("prompts", [1, 64], "cuda_graph_bs_prefill", PROMPTS),
    ],
)
def test_settings_of_both_sglang_engines(setting: str, value: Any, option: str, default: Any, tmp_path: Path) -> None:
    kind = KINDS["sglang"]
    for started in kind.options(Pair(model=tmp_path, drafter="auto", settings={setting: value, "adaptive": False})):
        assert started is not None
        assert started.options[option] == value
    assert started is not None
    given = json.loads(started.variables["REDRAFTER_SGLANG"])
    assert given == {"drafter": "auto", "shape": "16x5:63", "adaptive": False}, "the plug-in's settings alone"
    for started in kind.options(Pair(model=tmp_path, drafter="auto")):
        assert started is not None
        assert started.options[option] == default


def level(part: str, concurrency: int, ratio: float, temperature: float = 0.0) -> dict[str, Any]:
    figures = {"redrafter_tokens_per_step": 3.0, "equal": 7, "texts": 8, "temperature": temperature}
    return {"part": part, "concurrency": concurrency, "ratio": ratio} | figures


def test_the_headline_takes_every_part_by_itself() -> None:
    rows = [level("wide", 1, 2.0), level("wide", 8, 0.9), level("own", 1, 3.0), {"part": "small", "failed": "no"}]
    rows += [level("wide", 1, 1.7, 0.7), level("own", 2, 1.6, 0.7)]
    rows.append({"part": "arrivals", "requests_per_s": 0.5, "ratio": 1.5})
    for settings, equal in (({"first": 1}, 0), ({"last": 1}, 1), ({"last": 1}, 2)):
        parted = [5] * (2 - equal)
        row = {"part": "small", "settings": settings, "equal": equal, "count": 2, "agreeing_tokens": 50}
        rows.append(row | {"parted_at": parted})
    also = [{"settings": {"backend": "fa3", "drafts": False}, "tokens_per_s": 80.0}]
    rows[1] |= {"redrafter_tokens_per_s": 90.0, "also": [*also, {"settings": {"drafts": True}, "tokens_per_s": 100.0}]}
    assert headline(rows) == {
        "small_equal": 3 / 4,
        "small_partings_per_1000_tokens": 10.0,
        "ratio_at_1": 2.0,
        "ratio_at_8": 0.9,
        "ratio_to_other_plain_at_8": 90 / 80,
        "tokens_per_step": 3.0,
        "min_ratio_to_plain": 0.9,
        "equal": 14 / 16,
        "own_ratio_at_1": 3.0,
        "own_tokens_per_step": 3.0,
        "own_min_ratio_to_plain": 3.0,
        "own_equal": 7 / 8,
        "t0.7_ratio_at_1": 1.7,
        "t0.7_tokens_per_step": 3.0,
        "t0.7_min_ratio_to_plain": 1.7,
        "t0.7_equal": 7 / 8,
        "own_t0.7_ratio_at_2": 1.6,
        "own_t0.7_min_ratio_to_plain": 1.6,
        "own_t0.7_equal": 7 / 8,
        "ratio_at_0.5_per_s": 1.5,
    }


def test_the_processes_of_other_engines_import_only_the_standard_library() -> None:
    """Their environment has the engine's packages, which may be other versions than redrafter's."""
    for name in ("sglang_process.py", "vllm_process.py", "process.py"):
        for line in (HERE / "engines" / name).read_text().splitlines():
            if line.startswith(("import ", "from ")):
                module = line.split()[1]
                assert module == "benchmarks.engines.process" or module.split(".")[0] in sys.stdlib_module_names


def test_tables_show_one_temperature_and_leave_cells_empty() -> None:
    def row(engine: str, concurrency: int, temperature: float, **figures: Any) -> dict[str, Any]:
        speeds = {"plain_tokens_per_s": 100.0, "redrafter_tokens_per_s": 200.0, "plain_equal_to_first_level": 3}
        given = level("wide", concurrency, 2.0, temperature) | speeds
        return given | {"engine": engine, "model": "M", **figures}

    sglang = "SGLang 0.5.16, Triton attention"
    also = [{"settings": {"depth": 1}, "tokens_per_s": 1.0}, {"settings": {"drafts": False}, "tokens_per_s": 110.0}]
    rows = [row(sglang, 8, 0, also=also), row(sglang, 1, 0, commit="0ld"), row(sglang, 1, 1, ratio=1.5)]
    speeds, sampled = (
        by_level({"rows": rows}, "at once", columns, temperature, "{:.1f}")
        for columns, temperature in ((SPEEDS, 0), (SAMPLED, 1))
    )
    assert speeds[2:] == [
        "| 1 |  |  |  | 100.0 | 200.0 |  |  |  |  |",
        "| 8 |  |  | 110.0 | 100.0 | 200.0 |  |  |  |  |",
    ]
    assert sampled == ["| at once | SGLang: speedup | vLLM: speedup |", "|---|---|---|", "| 1 | 1.5 |  |"]
    assert engine({"rows": rows}).splitlines()[2:] == [
        "| 1 (commit 0ld) | 100 | 200 | **2.00×** | 3.00 | 7 of 8 | 3 of 8 |",
        "| 8 | 100 | 200 | **2.00×** | 3.00 | 7 of 8 |  |",
    ]
