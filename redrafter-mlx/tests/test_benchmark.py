"""benchmarks/mlx_cpu.py runs, with tiny random models, and counts."""

import json

import pytest

from benchmarks import mlx_cpu


@pytest.mark.long
def test_the_benchmark_script(tmp_path):
    first, save = tmp_path / "first.json", tmp_path / "result.json"
    mlx_cpu.main(["--smoke", "--save", str(first), "--parts", "torch", "fp32", "speed"])
    mlx_cpu.main(["--smoke", "--save", str(save), "--parts", "q4", "bf16", "--with", str(first)])
    result = json.loads(save.read_text())
    by_part = {row["part"]: row for row in result["rows"]}
    assert set(by_part) == set(mlx_cpu.PARTS)
    headline = result["headline"]
    assert headline["texts"] == 6
    assert by_part["fp32"]["equal"] == 2
    assert headline["wrong"] == 0
    assert abs(headline["tokens_per_step"] / headline["tokens_per_step_torch"] - 1) < 0.01
    assert headline["vs_plain"] > 0
