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
        ("[1]", "must hold a JSON object such as"),
        ("{", "got '{': Expecting property name"),
        ('{"width": 3}', r"has no \['width'\]"),
        ('{"rule": "typical"}', "rule must be one of seeded, sglang"),
        ('{"shape": "16"}', "a shape is written WxL"),
        ('{"graphs": 1}', "graphs must be true or false"),
    ],
)
def test_wrong_settings(text, message):
    with pytest.raises(ConfigError, match=message):
        settings.Settings.of({settings.VARIABLE: text})


def test_the_size_of_the_largest_tree():
    """Given, or that of the shape, or 64. A shape that is too small is refused before the model is loaded."""
    assert settings.Settings().nodes(None) == 64
    assert settings.Settings().nodes(12) == 12
    assert settings.Settings(shape="4x4").nodes(None) == 17
    assert settings.Settings(shape="4x4:15").nodes(None) == 16
    assert settings.Settings(shape="4x4:15").nodes(17) == 17
    with pytest.raises(ConfigError, match="at most 17 nodes with the root, but --speculative-num-draft-tokens is 64"):
        settings.Settings(shape="4x4").nodes(64)
