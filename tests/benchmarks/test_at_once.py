"""Parts of a benchmark in processes of their own: their rows, their order, and what is said about a part that fails."""

from pathlib import Path

from benchmarks.at_once import run_at_once

SCRIPT = """
import json, sys
words = sys.argv[1:]
if "bad" in words:
    sys.exit("this part has no data")
save = words[words.index("--save") + 1]
json.dump({"rows": [{"words": words}]}, open(save, "w"))
print("measured")
"""


def test_rows_come_in_the_order_of_the_parts_and_a_failure_is_said(tmp_path: Path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    old = tmp_path / "logs" / "b.json"
    old.parent.mkdir()
    old.write_text('{"rows": [{"words": "of an earlier run"}]}')
    parts = {"a part": ["--name", "a"], "b": ["bad"], "c": ["--name", "c"]}
    rows, failed = run_at_once(str(script), ["--name", "all", "--at-once"], parts, tmp_path / "logs")
    assert failed == ["b"]
    assert [row["words"][:6] for row in rows] == [["--name", "all", "--at-once", "--name", n, "--save"] for n in "ac"]
    assert all(row["words"][-1] == "--no-at-once" for row in rows)
    said = capsys.readouterr().out
    assert "FAILED b" in said
    assert "this part has no data" in said
    assert "done a part measured" in said
