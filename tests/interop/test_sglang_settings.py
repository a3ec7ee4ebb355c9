"""The settings of the plug-in for SGLang."""

import pytest

from redrafter import Shape
from redrafter.errors import ConfigError
from redrafter.interop.sglang import settings


def test_settings():
    assert settings.Settings.of({}).folder == "recurrent"
    assert settings.Settings.of({}).ngrams
    given = settings.Settings.of({settings.VARIABLE: '{"drafter": "a/b", "shape": "4x4:15"}'})
    assert (given.folder, given.ngrams, Shape.of(given.shape).budget) == ("a/b", False, 15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold a JSON object"),
        ("{", "must hold a JSON object"),
        ('{"width": 3}', r"has no \['width'\]"),
        ('{"rule": "typical"}', "rule must be one of seeded, sglang"),
        ('{"shape": "16"}', "a shape is written WxL"),
        ('{"graphs": 1}', "graphs must be true or false"),
    ],
)
def test_wrong_settings(text, message):
    with pytest.raises(ConfigError, match=message):
        settings.Settings.of({settings.VARIABLE: text})
