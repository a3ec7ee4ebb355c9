"""Files of questions: what is no text is refused in one line that names the file and the line."""

import json

import pytest

from redrafter.errors import RedrafterError
from redrafter.questions import read_questions


@pytest.mark.parametrize("turns", [[1, 2], [], "ab", [""], [None], None, 5], ids=str)
def test_turns_that_are_no_texts(tmp_path, turns):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"turns": ["good"]}) + "\n" + json.dumps({"turns": turns}) + "\n")
    with pytest.raises(RedrafterError, match=r"a\.jsonl, line 2: [^\n]*turns"):
        read_questions(path)
