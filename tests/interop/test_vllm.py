"""The drafter inside a real vLLM: `make test-vllm`. Without vLLM there is nothing to test here.

Every text is compared with the one that vLLM writes by itself. `REDRAFTER_PROMPTS` says how many of MT-Bench's first
turns.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
ROOT = Path(__file__).parents[2]

import torch  # noqa: E402
import vllm  # noqa: E402

import redrafter  # noqa: E402
from benchmarks import vllm_cpu as bench  # noqa: E402
from benchmarks.common import QUESTIONS  # noqa: E402
from redrafter import Shape  # noqa: E402
from redrafter.drafters import (  # noqa: E402
    RecurrentNet,
    checkpoint,
    files,
    shipped,
)
from redrafter.errors import ConfigError  # noqa: E402
from redrafter.interop.vllm import Proposer, ProposerConfig, check_version  # noqa: E402
from redrafter.targets.default import default_model  # noqa: E402

DEPTH = 3
TOKENS = 64
PROMPTS = int(os.environ.get("REDRAFTER_PROMPTS", "80"))
SMALL = {"block_size": 32, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
"""Prompts come in pieces, and a text can reach the longest there may be."""


@pytest.fixture(scope="module")
def own():
    return redrafter.load(device="cpu", dtype="fp32", shape=Shape(width=1, length=DEPTH))


@pytest.fixture(scope="module")
def prompts(own):
    return bench.turns(own, QUESTIONS, PROMPTS)


@pytest.fixture(scope="module")
def by_itself():
    """vLLM without a drafter."""
    with bench.engine(0, enable_prefix_caching=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(by_itself, prompts):
    return bench.write(by_itself, prompts, [TOKENS] * len(prompts))


@pytest.fixture(scope="module")
def many(own):
    return bench.mixed(own, QUESTIONS)


@pytest.fixture(scope="module")
def plain_many(by_itself, many):
    return bench.write(by_itself, *many)


def same(own, prompts, plain, texts) -> None:
    found = bench.compare(own, prompts, plain, texts)
    assert found["wrong"] == 0, found["differences"]
    assert found["ties"] <= found["texts"] // 20, found["differences"]


def test_comparison_twin(own, prompts, plain):
    """The comparison notices one wrong token, and a text that ends early."""
    spoilt = [list(t) for t in plain]
    spoilt[0][5] = (spoilt[0][5] + 1) % own.target.vocab_size
    spoilt[1] = spoilt[1][:-1]
    assert bench.compare(own, prompts, plain, spoilt)["wrong"] == 2


def test_first_turns(own, prompts, plain):
    with bench.engine(DEPTH) as llm:
        texts = bench.write(llm, prompts, [TOKENS] * len(prompts))
        found = bench.figures(texts, bench.counted(llm))
    same(own, prompts, plain, texts)
    chain = bench.own_chain(own, prompts, TOKENS)
    for name in ("tokens_per_step", "uncut"):
        assert found[name] == pytest.approx(chain[name], rel=0.02)
    assert found["tokens_per_step"] > 1.7, "or the drafter reads something else than it was trained on"


def test_many_at_once_with_a_prefix_cache(own, many, plain_many):
    with bench.engine(DEPTH, enable_prefix_caching=True) as llm:
        texts = bench.write(llm, *many)
        again = bench.write(llm, *many)  # now nearly all of every prompt is cached
        counts = bench.counted(llm)
    same(own, many[0], plain_many, texts)
    same(own, many[0], plain_many, again)
    assert counts["prefix_hits"] > sum(map(len, many[0])) // 2


def test_two_ranks(own, prompts, plain, many, plain_many, tmp_path):
    model = bench.twelve_heads(tmp_path)
    with bench.engine(DEPTH, model=model, tensor_parallel_size=2, enable_prefix_caching=True) as llm:
        texts = bench.write(llm, prompts, [TOKENS] * len(prompts))
        found = bench.figures(texts, bench.counted(llm))
        mixed = bench.write(llm, *many)
    same(own, prompts, plain, texts)
    same(own, many[0], plain_many, mixed)
    assert found["tokens_per_step"] == pytest.approx(bench.own_chain(own, prompts, TOKENS)["tokens_per_step"], rel=0.02)


@pytest.fixture(scope="module")
def small(own):
    """Short prompts, and what vLLM writes for each of them when nothing disturbs it."""
    chosen = [p for p in bench.turns(own, QUESTIONS, 40) if len(p) < 120][:8]
    with bench.engine(0, **SMALL) as llm:
        return chosen, bench.write(llm, chosen, [TOKENS] * 8), bench.write(llm, chosen[:1], [256])[0]


def test_preempted_cancelled_and_longest_requests(own, small):
    """One engine with a tiny cache: requests are preempted; some are cancelled; one goes to the end of its context."""
    chosen, texts, longest = small
    assert len(chosen) == 8
    with bench.engine(DEPTH, num_gpu_blocks_override=14, enable_prefix_caching=True, **SMALL) as llm:
        found = bench.write(llm, chosen, [TOKENS] * 8)
        assert bench.counted(llm)["preemptions"] > 0
        same(own, chosen, texts, found)
        same(own, chosen[4:], texts[4:], cancelled(llm, chosen, gone=4))
        same(own, chosen[4:], texts[4:], cancelled(llm, chosen, gone=4))  # the same names again
        before = bench.counted(llm)
        whole = bench.write(llm, chosen[:2], [256, TOKENS])
        same(own, chosen[:1], [longest], whole[:1])
        assert len(chosen[0]) + len(whole[0]) == 256
        assert bench.figures(whole, bench.since(llm, before))["tokens_per_step"] > 1.3


def cancelled(llm, prompts, gone: int) -> list[list[int]]:
    """All texts but the first `gone`, whose requests are cancelled after a few steps."""
    engine, params = llm.llm_engine, vllm.SamplingParams(temperature=0.0, max_tokens=TOKENS)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"request-{i}", {"prompt_token_ids": prompt}, params)
    texts: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for done in engine.step():
            if done.finished:
                texts[done.request_id] = list(done.outputs[0].token_ids)
        steps += 1
        if steps <= gone:
            engine.abort_request([f"request-{steps - 1}"])
    return [texts[f"request-{i}"] for i in range(gone, len(prompts))]


def test_a_drafter_that_knows_nothing_changes_no_text(own, prompts, plain, tmp_path):
    """Random weights: hardly a guess is right. Also the twin of tokens/step: it is the drafter that earns them."""
    trained, _ = checkpoint.read(shipped.find(own.target))
    torch.manual_seed(0)
    checkpoint.write(tmp_path, RecurrentNet(trained.config), own.target)
    few = min(8, len(prompts))
    additional = {"redrafter": {"drafter": str(tmp_path), "width": 2}}
    with bench.engine(DEPTH, additional_config=additional) as llm:
        texts = bench.write(llm, prompts[:few], [16] * few)
        assert bench.figures(texts, bench.counted(llm))["tokens_per_step"] < 1.2
    same(own, prompts[:few], [t[:16] for t in plain[:few]], texts)


def test_unsure_guesses_are_left_out(own, prompts, plain):
    few = min(8, len(prompts))
    with bench.engine(DEPTH, additional_config={"redrafter": {"width": 4, "least": 0.3}}) as llm:
        texts = bench.write(llm, prompts[:few], [TOKENS] * few)
        counts = bench.counted(llm)
    same(own, prompts[:few], plain[:few], texts)
    assert counts["drafts"] < counts["drafted"] < DEPTH * counts["drafts"]
    assert counts["accepted"] > 0.5 * counts["drafted"]


# The command asks for the version of a package named vllm, which the CPU build is not: it ends there without this.
CLI = [
    sys.executable,
    "-c",
    "import importlib.metadata as m; f = m.version; "
    "m.version = lambda n: f('vllm-cpu') + '+cpu' if n == 'vllm' else f(n); "
    "from vllm.entrypoints.cli.main import main; main()",
]


def refused(*options: str) -> str:
    """The one line of ours that `vllm serve` ends with."""
    command = [*CLI, *served(default_model(), free_port()), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    lines = {re.sub(r"^\(.*?\) ", "", x) for x in done.stderr.splitlines() if re.match(r"(\(.*?\) )?redrafter: ", x)}
    assert len(lines) == 1, done.stderr[-3000:]
    return lines.pop()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def served(model: Path, port: int) -> list[str]:
    """The page's first command, with a model and a port; eager, for it saves a minute."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    command = re.search(r"^vllm (serve MODEL.*?)\n```", page, flags=re.DOTALL | re.MULTILINE)
    assert command is not None
    words = shlex.split(command.group(1).replace("\\\n", " "))
    usual = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--port", str(port)]
    return [str(model) if w == "MODEL" else w for w in words] + usual


def test_served_as_the_page_says(own, prompts, plain):
    port = free_port()
    command = [*CLI, *served(default_model(), port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def ask(path: str, body: dict | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()

    try:
        until = time.monotonic() + 300
        while True:
            try:
                ask("/health")
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < until
                time.sleep(1)
        body = {"model": str(default_model()), "prompt": prompts[0], "max_tokens": TOKENS, "temperature": 0}
        text = json.loads(ask("/v1/completions", body))["choices"][0]["text"]
        assert text == own.target.tokenizer.decode(plain[0], skip_special_tokens=True)
        accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)$", ask("/metrics"), re.MULTILINE)
        assert accepted is not None
        assert float(accepted.group(1)) > 0
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def test_a_drafter_for_another_model_is_refused(own, tmp_path):
    trained, made_for = checkpoint.read(shipped.find(own.target))
    config = json.loads((shipped.find(own.target) / files.CONFIG_FILE).read_text())
    config["target"] = made_for | {"name": "another", "tokenizer": "0" * 16}
    files.write_files(tmp_path, config, trained.state_dict())
    line = refused("--additional-config", json.dumps({"redrafter": {"drafter": str(tmp_path)}}))
    assert "was made for the tokenizer of another" in line


def test_a_missing_drafter_is_refused(tmp_path):
    line = refused("--additional-config", json.dumps({"redrafter": {"drafter": str(tmp_path / "nowhere")}}))
    assert "no drafter" in line
    assert "nowhere" in line


def test_an_untested_version_is_refused(monkeypatch, caplog):
    check_version()
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(
        ConfigError, match=r"tested with vLLM 0\.26\.0, 0\.32\.0, not with 0\.99\.0; install vllm==0\.32"
    ):
        Proposer(SimpleNamespace(additional_config={}))
    assert len(caplog.text.splitlines()) == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"widht": 2},
            r"has no \['widht'\]; it takes \['adaptive', 'drafter', 'graphs', 'least', 'runner', 'timing', 'width'\]",
        ),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"least": 1.5}, "least must be below 1, got 1.5"),
        ({"drafter": 3}, "drafter must be text, got 3"),
        ({"graphs": 1}, "graphs must be true or false, got 1"),
        ({"adaptive": 0}, "adaptive must be true or false, got 0"),
        ({"timing": -1}, "timing must be at least 0, got -1"),
        ([], "must be an object"),
    ],
)
def test_settings_that_make_no_sense(section, message):
    with pytest.raises(ConfigError, match=message):
        ProposerConfig.of({"redrafter": section})


def test_the_benchmark_runs(tmp_path):
    bench.main(["--smoke", "--save", str(tmp_path / "vllm.json")])
    result = json.loads((tmp_path / "vllm.json").read_text())
    assert {row["part"] for row in result["rows"]} == {"turns", "mixed", "speed"}
    assert result["headline"]["wrong"] == 0
