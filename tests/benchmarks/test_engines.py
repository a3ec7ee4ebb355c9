"""The parts of benchmarks/engines_gpu.py that need no engine: parcels, the client and its processes, the figures."""

import asyncio
import json
import os
import struct
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import HERE
from benchmarks.engines.client import EngineFailed, ProcessWriter, Written
from benchmarks.engines.figures import headline
from benchmarks.engines.kinds import KINDS, SIZES, Pair
from benchmarks.engines.parcels import Cut, Parcels, packed
from benchmarks.engines.process import answer
from benchmarks.engines.strip import CUBIN, MAGIC, PTX, strip
from benchmarks.engines_gpu import EnginesBenchmark
from redrafter.errors import ConfigError

ENTRY = 64  # bytes of an entry's header


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Device code of several kinds and architectures, as nvcc writes it into a library."""
    body = b""
    for kind, architecture, code in entries:
        header = struct.pack("<HHIQ", kind, 0, ENTRY, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
        body += header.ljust(ENTRY, b"\0") + code
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_strip_keeps_the_code_of_one_gpu_and_every_address() -> None:
    several = fatbin((CUBIN, 80, b"a" * 32), (CUBIN, 90, b"b" * 32), (PTX, 90, b"c" * 32))
    compiled = fatbin((CUBIN, 75, b"d" * 32), (PTX, 80, b"e" * 32), (PTX, 120, b"f" * 32))
    others = fatbin((CUBIN, 120, b"g" * 64), (CUBIN, 100, b"h" * 32))
    unknown = MAGIC + struct.pack("<HHQ", 1, 16, 48) + b"?" * 48
    cut_off = MAGIC + b"\1\0"
    library = b"start" + several + b"between" + compiled + others + unknown + b"end" + cut_off
    kept = strip(library, 90)
    assert len(kept) == len(library)
    for part, alone in [
        (several, fatbin((CUBIN, 90, b"b" * 32))),
        (compiled, fatbin((PTX, 80, b"e" * 32))),
        (others, fatbin((CUBIN, 100, b"h" * 32))),
        (unknown, unknown),
    ]:
        at = library.index(part)
        assert kept[at : at + len(part)] == alone.ljust(len(part), b"\0")
    assert kept.startswith(b"start")
    assert kept.endswith(b"end" + cut_off)


def test_strip_keeps_the_code_of_chosen_sources() -> None:
    def code(source: str) -> bytes:
        return f"..._INTERNAL_0123abcd_9_{source}_cu_0123...".encode().ljust(96, b"x")

    ours, other = (
        fatbin((CUBIN, 80, code("fwd_bf16")), (CUBIN, 90, code("fwd_bf16"))),
        fatbin((CUBIN, 90, code("fwd_fp16"))),
    )
    smallest = fatbin((CUBIN, 90, b"y" * 32))
    kept = strip(ours + other + smallest, 90, "fwd_(bf16|x)|fwd")
    alone = fatbin((CUBIN, 90, code("fwd_bf16")))
    assert kept == alone.ljust(len(ours), b"\0") + smallest.ljust(len(other), b"\0") + smallest
    assert strip(other, 90, "fwd_bf16") == other, "the library's smallest code is its only one"


def test_parcels_are_as_few_as_fit() -> None:
    sizes = {"a": 30, "b": 25, "c": 12, "d": 10, "e": 3}
    assert packed(sizes, 40) == [["a", "d"], ["b", "c", "e"]]
    with pytest.raises(ConfigError, match="a has 30 bytes, a parcel at most 20"):
        packed(sizes, 20)


def test_a_wheel_is_cut_and_unpacked(tmp_path: Path) -> None:
    """Each file goes to the first archive that wants it; the parcels give back what was kept."""
    wheel = tmp_path / "whole.whl"
    code = b"x" + fatbin((CUBIN, 80, b"a" * 32), (CUBIN, 90, b"b" * 32))
    with zipfile.ZipFile(wheel, "w") as made:
        for name, data in {"p/big.so": b"1", "p/_C.so": code, "p/fa.so": b"2", "p/a.py": b"pass"}.items():
            made.writestr(name, data)
    cut = Cut("whole==1", (("big", ""), ("fa", "fa.zip"), ("", "rest.zip")), stripped="_C")
    listed = tmp_path / "wheels.txt"
    listed.write_text("")
    parcels = Parcels(
        requirements=listed,
        cuts=(cut,),
        stubs={"s/__init__.py": "stub = 1\n"},
        compiled="p",
        variables={"CACHE": "{folder}/cache"},
    )
    folder = tmp_path / "engine"
    for part in ("p1", "p10"):
        (folder / part).mkdir(parents=True)
    cut.write(wheel, folder / "p1")
    (folder / "p1" / "fa.zip").rename(tmp_path / "fa.zip")
    with pytest.raises(ConfigError, match="1 archives of 2"):
        parcels.unpack(folder)
    (tmp_path / "fa.zip").rename(folder / "p10" / "fa.zip")
    parcels.unpack(folder)
    files = {str(p.relative_to(folder / "site")) for p in (folder / "site" / "p").iterdir() if p.is_file()}
    assert files == {"p/_C.so", "p/fa.so", "p/a.py"}
    assert (folder / "site" / "p" / "_C.so").read_bytes() == strip(code, 90)
    assert (folder / "stubs" / "s" / "__init__.py").read_text() == "stub = 1\n"
    environment = parcels.environment(folder, tmp_path)
    assert environment["CACHE"] == f"{folder}/cache"
    assert environment["PYTHONPATH"].split(":")[0] == str(folder / "site")


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engine_lists_its_wheels_once_with_versions(name: str) -> None:
    parcels = KINDS[name].parcels
    assert parcels is not None
    lines = parcels.requirements.read_text().split()
    assert all("==" in line for line in lines)
    assert len({line.split("==")[0] for line in lines}) == len(lines)
    for cut in parcels.cuts:
        assert cut.archives[-1][0] == "", "every file has an archive"


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


def test_engines_take_turns_and_the_first_round_does_not_count() -> None:
    turns = list[str]()

    class Counting:
        """Writes as many tokens each second as the list says, turn by turn."""

        def __init__(self, name: str, speeds: list[float]) -> None:
            self.name, self.speeds = name, iter(speeds)

        def write(self, *_: Any) -> Written:
            turns.append(self.name)
            return Written(texts=[[1, 2]] * 4, seconds=8 / next(self.speeds), steps=4)

    class Benchmark(EnginesBenchmark):
        def __init__(self) -> None:
            self.rows, self.settings, self.questions, self.began = [], {}, [[1]], time.monotonic()
            given = {
                "levels": [1],
                "seconds": 60.0,
                "requests": 4,
                "temperatures": [0.0, 1.0],
                "tokens": 2,
                "shape": "vicuna-7b",
            }
            self.args = Namespace(**given, rounds=3, beam="16x5:63", depth=4)

        def save(self) -> None:
            pass

    benchmark = Benchmark()
    plain, ours = Counting("plain", [1, 100, 100, 50] * 2), Counting("ours", [1, 200, 150, 50] * 2)
    other = Counting("other", [1, 50, 100, 100] * 2)
    benchmark.levels("wide", KINDS["own"], plain, ours, [({"adaptive": False}, other)])  # type: ignore[arg-type, list-item]
    assert turns == ["plain", "ours", "other"] * 8
    for row in benchmark.rows:
        assert row["ratios"] == pytest.approx([2.0, 1.5, 1.0])
        assert row["ratio"] == pytest.approx(1.5)
        assert row["plain_tokens_per_s"] == pytest.approx(100)
        (also,) = row["also"]
        assert also["settings"] == {"adaptive": False}
        assert also["ratios"] == pytest.approx([0.5, 1.0, 2.0])
        assert also["tokens_per_s"] == pytest.approx(100)
    assert [row["temperature"] for row in benchmark.rows] == [0.0, 1.0]
    assert headline(benchmark.rows).keys() >= {"ratio_at_1", "t1_ratio_at_1"}


def test_a_further_contender_that_does_not_start_is_left_out(stub: Any, tmp_path: Path) -> None:
    class Benchmark(EnginesBenchmark):
        def __init__(self) -> None:
            self.rows, self.settings, self.questions = [], {}, [[4]]
            given = {
                "also": [{"broken": True}, {"broken": False}],
                "tokens": 2,
                "device": "cuda",
                "save": tmp_path / "r",
            }
            self.args = Namespace(**given, twin=tmp_path, beam="16x5:63", depth=4)

        def other(self, pair: Pair, name: str) -> Any:
            return stub(broken=pair.settings["broken"])

    benchmark = Benchmark()
    assert [settings for settings, _ in benchmark.others()] == [{"broken": False}]
    assert "no such model" in benchmark.rows[0]["log"]


def test_sglang_decodes_plainly_with_another_attention(tmp_path: Path) -> None:
    kind, asked = KINDS["sglang"], {"backend": "fa3"}
    plain, speculative = kind.options(Pair(model=tmp_path, drafter="auto", settings=asked))
    assert plain is not None
    for started in (plain, speculative):
        assert started.options["attention_backend"] == "fa3"
        assert "backend" not in started.variables["REDRAFTER_SGLANG"]
    assert kind.options(Pair(model=tmp_path, drafter="auto"))[1].options["attention_backend"] == "triton"


def test_sglang_records_what_is_asked(tmp_path: Path) -> None:
    kind, asked = KINDS["sglang"], {"batches": [1, 8], "prompts": [1, 64]}
    for started in kind.options(Pair(model=tmp_path, drafter="auto", settings=asked)):
        assert started is not None
        assert started.options["cuda_graph_bs_decode"] == [1, 8]
        assert started.options["cuda_graph_bs_prefill"] == [1, 64]
        assert "batches" not in started.variables["REDRAFTER_SGLANG"]
        assert "prompts" not in started.variables["REDRAFTER_SGLANG"]
    recorded = kind.options(Pair(model=tmp_path, drafter="auto"))[1].options
    assert recorded["cuda_graph_bs_decode"] == [1, 2, 4, 8, 16, 32]
    assert recorded["cuda_graph_bs_prefill"][-1] == 2048


def level(part: str, concurrency: int, ratio: float) -> dict[str, Any]:
    figures = {"redrafter_tokens_per_step": 3.0, "equal": 7, "texts": 8, "temperature": 0.0}
    return {"part": part, "concurrency": concurrency, "ratio": ratio} | figures


def test_the_headline_takes_every_part_by_itself() -> None:
    rows = [level("wide", 1, 2.0), level("wide", 8, 0.9), level("own", 1, 3.0), {"part": "small", "failed": "no"}]
    rows.append({"part": "arrivals", "requests_per_s": 0.5, "ratio": 1.5})
    assert headline(rows) == {
        "ratio_at_1": 2.0,
        "ratio_at_8": 0.9,
        "tokens_per_step": 3.0,
        "min_ratio_to_plain": 0.9,
        "equal": 14 / 16,
        "own_ratio_at_1": 3.0,
        "own_tokens_per_step": 3.0,
        "own_min_ratio_to_plain": 3.0,
        "own_equal": 7 / 8,
        "ratio_at_0.5_per_s": 1.5,
    }


def test_the_processes_of_other_engines_import_only_the_standard_library() -> None:
    """Their environment has the engine's packages, which may be other versions than redrafter's."""
    for name in ("sglang_process.py", "vllm_process.py", "process.py"):
        for line in (HERE / "engines" / name).read_text().splitlines():
            if line.startswith(("import ", "from ")):
                module = line.split()[1]
                assert module == "benchmarks.engines.process" or module.split(".")[0] in sys.stdlib_module_names
