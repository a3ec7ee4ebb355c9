"""Frameworks against a live server: `make test-clients`, which gives them an environment of their own."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from redrafter.serve.model import Served
from tests.helpers.bytes import byte_target
from tests.helpers.serving import NAME, make_served, plain, running
from tests.serve.test_defaults import reference

PYTHON = os.environ.get("REDRAFTER_CLIENTS")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="no environment with frameworks here: make test-clients")
FOLDER = Path(__file__).parent / "clients"


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served(byte_target(max_position_embeddings=2048), context=1500)


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with running(served) as address:
        yield address


def run(name: str, *words: str) -> str:
    assert PYTHON is not None
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(FOLDER / name), *words], capture_output=True, text=True, timeout=240, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_langchain(url: str) -> None:
    assert run("langchain_client.py", url, NAME) == "ok"


def test_lm_eval(url: str, served: Served, tmp_path: Path) -> None:
    told = json.loads(run("lm_eval_client.py", url, NAME, str(tmp_path)))["responses"]
    encode = served.engine.encode
    for (question, choices), answers in zip(
        (("name", ("yes", "no")), ("age", ("1", "22"))), told["tiny_choice"], strict=True
    ):
        for choice, ((likelihood, greedy),) in zip(choices, answers, strict=True):
            whole = encode(f"{question} {choice}")
            own = reference(served, whole)[len(encode(question)) - 1 :]
            assert likelihood == pytest.approx(sum(own), abs=1e-3)
            assert isinstance(greedy, bool)
    (first,), (second,) = told["tiny_text"]
    alone = plain(served).generate(["name", "age"], max_new_tokens=8, stop=["\n"])
    assert [first[0], second[0]] == [c.text for c in alone]
