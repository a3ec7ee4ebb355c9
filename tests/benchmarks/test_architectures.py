"""What `benchmarks/architectures.py` says of a model, and that it can say each of the four things."""

from typing import Any

import pytest

from benchmarks import architectures, tiny_configs
from benchmarks.architectures import RESULTS, judge, model_types

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "deepseek_v3"])
def test_equal(model_type: str) -> None:
    row = judge(model_type)
    assert row["result"] == "equal", row
    assert row["tokens_per_step"] > 1.3, "trees are verified and accepted"


def test_refused_with_the_reason() -> None:
    row = judge("rwkv")
    assert (row["result"], "recurrent" in row["reason"]) == ("refused", True)


def test_not_built_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_configs.EXCEPTIONS, "llama", {"num_attention_heads": 5})
    row = judge("llama")
    assert (row["result"], "attention heads" in row["reason"]) == ("not_built", True)


def test_a_model_whose_text_differs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of `test_equal`: one token of one text is another."""
    own_texts = architectures.own_texts

    def other(model: Any) -> list[list[int]]:
        texts = own_texts(model)
        texts[2][9] ^= 1
        return texts

    monkeypatch.setattr(architectures, "own_texts", other)
    row = judge("llama")
    assert (row["result"], row["reason"]) == ("wrong", "oracle: text 2 differs at token 9")


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    """A limit that no model meets: each costs a worker, and the script goes on."""
    words = ["--only", "llama", "gpt2", "--limit", "0.01", "--save", str(tmp_path / "result.json")]
    architectures.main(words)
    assert capsys.readouterr().out.count("it takes more than 0.01 seconds") == 2


def test_every_causal_lm_is_listed() -> None:
    assert len(model_types()) > 150
    assert RESULTS[0] == "equal"
