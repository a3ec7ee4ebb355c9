"""The table of docs/models.md groups model types by their answers."""

from benchmarks.tables.architectures import families


def test_model_types_with_the_same_answers_share_a_line() -> None:
    kind = "a layer of the kind 'conv' keeps no keys for each token but the last inputs of a convolution, which"
    rows = [
        {"model_type": "one", "result": "equal", "fused": True, "packed": True},
        {"model_type": "two", "result": "equal", "fused": True, "packed": True},
        {"model_type": "three", "result": "equal", "fused": False, "packed": False},
        {"model_type": "four", "result": "refused", "reason": f"four: {kind}"},
        {"model_type": "five", "result": "wrong", "reason": "oracle: text 2 differs at token 9"},
        {"model_type": "six", "result": "not_built", "reason": "ImportError"},
    ]
    headline = {"equal": 3, "refused": 1, "wrong": 1, "not_built": 1}
    lines = families({"rows": rows, "headline": headline, "versions": {"transformers": "5"}}).splitlines()
    assert lines[0].startswith("Of 6 causal LMs of transformers 5, 3 give exactly")
    assert [line.split(" | ")[:2] for line in lines[4:]] == [
        ["| one, two", "yes"],
        ["| three", "yes"],
        ["| five", "no: **another text**"],
        ["| four", "no: `conv` layers keep the last inputs of a convolution"],
        ["| six", "not tried: transformers does not run a tiny model of it here"],
    ]
