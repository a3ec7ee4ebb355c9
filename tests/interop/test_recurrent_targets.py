"""Inside other engines, models with a recurrent state are refused at start."""

from types import SimpleNamespace

import pytest
from torch import nn

from redrafter.errors import UnsupportedTarget
from redrafter.interop.plugged import refuse_recurrent
from redrafter.interop.vllm.target import VllmTarget
from tests.helpers.hybrids import CONFIGS
from tests.helpers.zoo import make_model


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedTarget, match=r"keeps a recurrent state .*inside SGLang"):
        refuse_recurrent(CONFIGS[kind](), "SGLang")


@pytest.mark.parametrize("kind", ["llama", "qwen2-mixed", "gpt2"])
def test_attention_alone_is_taken(kind: str) -> None:
    refuse_recurrent(make_model(kind).config, "SGLang")


def test_before_anything_of_vllm_is_read() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=CONFIGS["qwen3.5"]()))
    with pytest.raises(UnsupportedTarget, match="inside vLLM"):
        VllmTarget(nn.Module(), config)


def test_before_anything_of_sglang_is_read() -> None:
    from redrafter.interop.sglang.target import SglangTarget

    runner = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=CONFIGS["qwen3.5"]()))
    with pytest.raises(UnsupportedTarget, match="inside SGLang"):
        SglangTarget(runner, None, "model")
