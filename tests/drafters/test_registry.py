"""The registry: every folder is listed, every kind is complete, and reading the options imports nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest

import redrafter.drafters
from redrafter import Engine
from redrafter.bench.specs import names_of
from redrafter.cli import doctor
from redrafter.cli.main import main
from redrafter.drafters import NoDrafter, registry
from redrafter.drafters.base import DrafterConfig, DrafterNet, NetDrafter
from redrafter.drafters.options import DrafterOptions
from redrafter.engine.resolve import resolve_drafter
from redrafter.errors import ConfigError
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, make_model

FOLDER = Path(redrafter.drafters.__file__).parent


def test_every_folder_is_an_entry():
    folders = {p.parent.name for p in FOLDER.glob("*/network.py")}
    kinds = [entry.kind for entry in registry.ENTRIES.values() if entry.kind]
    assert folders == {kind.partition(":")[0].rpartition(".")[2] for kind in kinds}
    for folder in folders:
        assert {"config.py", "network.py", "drafter.py", "loss.py"} <= {p.name for p in (FOLDER / folder).iterdir()}


@pytest.mark.parametrize("name", registry.names())
def test_a_kind_is_complete(name):
    kind = registry.get(name)
    assert kind.name == name
    assert issubclass(kind.config, DrafterConfig)
    assert issubclass(kind.network, DrafterNet)
    assert issubclass(kind.drafter, NetDrafter)


def test_options_are_read_without_torch():
    code = "import sys, redrafter.drafters.options, redrafter.train.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


KIND_CODE = """
from dataclasses import dataclass, replace
from redrafter.drafters.medusa import KIND as MEDUSA, MedusaConfig

@dataclass(frozen=True, kw_only=True)
class Config(MedusaConfig):
    kind = "theirs"

KIND = replace(MEDUSA, config=Config)
"""
MAKE_CODE = """
from redrafter.drafters import NgramDrafter

def make(target):
    return NgramDrafter(longest=2, shortest=1)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package of one module with entry points."""
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def install(package: str, code: str, **points: str) -> None:
        (tmp_path / f"{package}.py").write_text(code)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}:{place}" for name, place in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[redrafter.drafters]", *lines, ""]))
        registry._points.cache_clear()

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]
    monkeypatch.undo()
    registry._points.cache_clear()


def test_a_package_registers_drafters_and_is_imported_when_they_are_asked_for(install, capsys):
    install("their_kind", KIND_CODE, theirs="KIND")
    install("their_drafter", MAKE_CODE, lookup="make")
    assert registry.packages() == {"theirs": "their_kind", "lookup": "their_drafter"}
    for verb in ("train", "generate"):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert "'lookup' (package their_drafter)" in " ".join(capsys.readouterr().out.split())
    assert [kind for _, kind, *_ in names_of(["lookup", "theirs+ngram=f"], [])] == ["plain", "lookup", "theirs+ngram"]
    assert not {"their_kind", "their_drafter"} & set(sys.modules), "nothing is imported for a help text"
    target = load_target(make_model())
    assert DrafterOptions(drafter="theirs", heads=2).config_for(target).kind == "theirs"
    engine = Engine(target, resolve_drafter("lookup", target), shape=redrafter.Shape(width=1, length=4))
    drafted, plain = (e.generate(PROMPTS, max_new_tokens=24) for e in (engine, Engine(target, NoDrafter())))
    assert [c.tokens for c in drafted] == [c.tokens for c in plain]
    assert sum(c.stats.accepted for c in drafted) > 0
    assert ("drafter lookup", "of the package their_drafter", "") in doctor.drafters()


@pytest.mark.parametrize(
    ("code", "place", "message"),
    [
        ("import nowhere_at_all", "make", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def make(:", "make", "SyntaxError"),
        ("raise SystemExit(3)", "make", "SystemExit: 3"),
        ("x = 1", "make", "AttributeError"),
        ("make = 7", "make", "neither a DrafterKind nor a function of the target, but 7"),
        (KIND_CODE, "KIND", "its kind is named 'theirs'"),
        ("def make(target):\n    raise KeyError('a\\nb')", "make", "KeyError"),
        ("def make(target):\n    return None", "make", "it made no drafter, but None"),
    ],
    ids=str,
)
def test_a_broken_package_is_one_line_that_names_it(install, code, place, message):
    install("broken_package", code, broken=place)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_drafter("broken", load_target(make_model()))
    assert "broken_package" in str(caught.value)
    assert "\n" not in str(caught.value)
    if "target" not in code:
        [finding] = [found for found in doctor.drafters() if found[0] == "drafter broken"]
        assert finding[2] == "update or uninstall broken_package"
        with pytest.raises(ConfigError, match="broken_package"):
            DrafterOptions(drafter="broken")


def test_a_package_does_not_take_a_name_that_is_taken(install):
    install("taker", MAKE_CODE, ngram="make", medusa="make", twice="make")
    install("other_taker", MAKE_CODE, twice="make")
    target = load_target(make_model())
    assert resolve_drafter("ngram", target).longest == 4
    assert registry.get("medusa").name == "medusa"
    assert "taker" not in sys.modules
    with pytest.raises(ConfigError, match="packages other_taker and taker have each a drafter named 'twice'"):
        resolve_drafter("twice", target)
    refused = {name for name, _, advice in doctor.drafters() if advice}
    assert refused == {"drafter ngram", "drafter medusa", "drafter twice"}
