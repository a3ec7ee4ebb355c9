"""The settings of the plug-in for SGLang."""

import pytest

from redrafter import Shape
from redrafter.errors import ConfigError
from redrafter.interop.sglang import checks, plugin, settings
from tests.helpers import sglang_stub as stub
from tests.helpers.sglang_worker import server_args


def test_settings():
    assert settings.Settings.of({}).folder == "recurrent"
    assert settings.Settings.of({}).ngrams
    given = settings.Settings.of({settings.VARIABLE: '{"drafter": "a/b", "shape": "4x4:15"}'})
    assert (given.folder, given.ngrams, Shape.of(given.shape).budget) == ("a/b", False, 15)
    mixed = settings.Settings.of({settings.VARIABLE: '{"drafter": "a/b+ngram"}'})
    assert (mixed.folder, mixed.ngrams) == ("a/b", True)
    assert settings.Settings.of({settings.VARIABLE: ""}) == settings.Settings()


def test_the_engines_command_line(monkeypatch):
    """SGLang learns the size of the largest tree, and that a drafter needs no room in its cache."""
    stub.install(monkeypatch)
    plugin.register()
    for given, nodes in ((None, 64), (12, 12)):
        args = server_args(speculative_num_draft_tokens=given)
        stub.ALGORITHMS["REDRAFTER"].handle_server_args(args)
        assert args.speculative_num_draft_tokens == nodes
    assert not stub.ALGORITHMS["REDRAFTER"].has_draft_kv()


def test_pipeline_stages_are_refused(monkeypatch):
    stub.install(monkeypatch)
    checks.check(server_args())
    with pytest.raises(ConfigError, match="works on one pipeline stage"):
        checks.check(server_args(pp_size=2))


def test_a_server_for_decoding_alone_is_refused(monkeypatch):
    stub.install(monkeypatch)
    with pytest.raises(ConfigError, match="leave out --disaggregation-mode"):
        checks.check(server_args(disaggregation_mode="decode"))


def test_a_tree_of_the_root_alone_is_refused():
    assert settings.Settings().nodes(2) == 2
    with pytest.raises(ConfigError, match="counts the tree's root: give 2 or more"):
        settings.Settings().nodes(1)


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
