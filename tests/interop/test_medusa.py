"""Published Medusa drafters: their two layouts, the pickle of their authors, and what is refused."""

import json
import pickle

import pytest
import torch
import torch.nn.functional as F

import redrafter
from benchmarks.formats import GOLDEN, TOLERANCE, difference, drafted
from benchmarks.tiny_drafters import DRAFT_VOCAB, TINY, VOCAB, WIDTH, Tiny, draft_tokens
from redrafter import Shape
from redrafter.cli.main import main
from redrafter.drafters.files import write_files
from redrafter.errors import CorruptCheckpoint, DrafterMismatch, RedrafterError, UnsupportedDrafter
from redrafter.interop import conventions, published
from redrafter.interop.published import recognise
from redrafter.targets import load_target, verdicts
from tests.helpers.zoo import PROMPTS, make_model

AUTHORS, VLLM = "Medusa", "Medusa, vLLM"


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


def refused(folder, target, kind=CorruptCheckpoint) -> str:
    with pytest.raises(kind) as caught:
        published.read(folder, target)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def read(made, folder, target):
    return published.read(made.write(folder), target)


def test_twin_networks_in_another_order_are_another_output(tmp_path):
    made = TINY[AUTHORS]()
    golden = torch.tensor(json.loads(GOLDEN.read_text())[AUTHORS]["logits"])
    swapped = {("1" if k[0] == "0" else "0" if k[0] == "1" else k[0]) + k[1:]: v for k, v in made.tensors.items()}
    assert difference(drafted(Tiny(made.config, swapped, made.file).write(tmp_path)), golden) > 10 * TOLERANCE


def test_the_layouts_are_two_ways_to_write_the_same(tmp_path, target):
    made = TINY[AUTHORS]()
    found = read(made, tmp_path / "authors", target)
    assert found.format == "Medusa in the layout of its authors"
    assert found.net.config.heads == 3, "the configuration of the authors' files names fewer"
    renamed = {}
    for name, tensor in made.tensors.items():
        head, _, *rest = name.split(".")
        new = f"blocks.{head}.layers.0.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"
        renamed[f"medusa_heads.{new}"] = tensor
    config = TINY[VLLM]().config | {"truncated_vocab_size": VOCAB, "num_hidden_layers": 1}
    again = read(Tiny(config, renamed), tmp_path / "vllm", target)
    assert again.format == "Medusa in the layout of vLLM"
    assert torch.equal(drafted(tmp_path / "authors"), drafted(tmp_path / "vllm"))


def test_the_pickle_of_its_authors_is_read_without_running_it(tmp_path, target):
    made = TINY[AUTHORS]()
    expected = drafted(made.write(tmp_path / "safe"))
    folder = tmp_path / "pickle"
    Tiny(made.config, {}, "none").write(folder)
    path = folder / "medusa_lm_head.pt"
    torch.save(made.tensors, path)
    assert torch.equal(drafted(folder), expected)
    for damaged in (
        [1],
        made.tensors | {"0.0.linear.bias": torch.full((WIDTH,), torch.nan)},
        made.tensors | {"0.1.weight": torch.zeros(1).expand(VOCAB, 10**9)},
    ):
        torch.save(damaged, path)
        assert "medusa_lm_head.pt" in refused(folder, target)
    path.write_bytes(pickle.dumps(made.config))
    assert "medusa_lm_head.pt" in refused(folder, target)


def test_a_pickle_before_the_parts_is_not_unpickled(tmp_path, target, monkeypatch):
    """torch would read the pickle, whose arrays may have any size, and `zipfile` the harmless parts behind it."""
    made = TINY[AUTHORS]()
    folder = Tiny(made.config, {}, "none").write(tmp_path / "pickle")
    path, harmless = folder / "medusa_lm_head.pt", tmp_path / "harmless.pt"
    torch.save(made.tensors, harmless)
    torch.save({"x": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("was unpickled"))
    for before, message in ((path.read_bytes(), "since version 1.6"), (b"PK\x03\x04" + b"0" * 60, "stands before")):
        path.write_bytes(before + harmless.read_bytes())
        assert message in refused(folder, target)


def test_other_files_are_not_unpickled(tmp_path, target):
    made = TINY[VLLM]()
    Tiny(made.config, {}, "none").write(tmp_path)
    torch.save(made.tensors, tmp_path / "pytorch_model.bin")
    assert "a pickle, which can run any code" in refused(tmp_path, target)


def test_fewer_tokens_and_heads_that_are_one(tmp_path, target):
    made = TINY[VLLM]()
    net = read(made, tmp_path / "fewer", target).net
    assert net.token_ids.tolist() == draft_tokens().tolist()
    whole = {name: tensor for name, tensor in made.tensors.items() if not name.startswith("lm_heads.")}
    whole |= {f"lm_heads.{h}.weight": torch.randn(VOCAB, WIDTH) for h in range(3)}
    cut = read(Tiny(made.config, whole), tmp_path / "cut", target).net
    assert torch.equal(cut.own[1], whole["lm_heads.1.weight"][draft_tokens()])
    one = {name: tensor for name, tensor in made.tensors.items() if not name.startswith(("lm_heads.1", "lm_heads.2"))}
    net = read(Tiny(made.config | {"original_lm_head": True}, one), tmp_path / "one", target).net
    assert torch.equal(net.own[2], made.tensors["lm_heads.0.weight"])
    bare = {name: tensor for name, tensor in TINY[AUTHORS]().tensors.items() if "linear" in name}
    net = read(Tiny(TINY[AUTHORS]().config, bare), tmp_path / "bare", target).net
    assert net.tied, "without heads of its own it has the target's"


def without(name):
    return lambda made: Tiny(made.config, {k: v for k, v in made.tensors.items() if k != name}, made.file)


def with_tensor(name, value):
    return lambda made: Tiny(made.config, made.tensors | {name: value}, made.file)


def with_config(**config):
    return lambda made: Tiny(made.config | config, made.tensors, made.file)


@pytest.mark.parametrize(
    ("layout", "how", "kind", "message"),
    [
        (AUTHORS, without("1.0.linear.weight"), CorruptCheckpoint, "lacks 'blocks.1.layers.0.weight'"),
        (AUTHORS, without("1.1.weight"), CorruptCheckpoint, "lacks 'lm_heads.1.weight'"),
        (AUTHORS, with_tensor("other.weight", torch.ones(3)), CorruptCheckpoint, "does not know: 'other.weight'"),
        (AUTHORS, with_tensor("70.0.linear.weight", torch.ones(3)), CorruptCheckpoint, "has 71 networks"),
        (AUTHORS, with_config(medusa_num_heads=10**6), CorruptCheckpoint, "a whole number from 1 to 64"),
        (AUTHORS, with_config(medusa_num_layers=2), CorruptCheckpoint, "lacks 'blocks.0.layers.1.bias'"),
        (AUTHORS, with_config(hidden_size=64), DrafterMismatch, "hidden states of 64 numbers, but those of the target"),
        (AUTHORS, with_config(vocab_size=50), DrafterMismatch, "a vocabulary of 50, but the target"),
        (AUTHORS, with_tensor("0.1.weight", torch.ones(50, WIDTH)), DrafterMismatch, "a vocabulary of 50, but"),
        (AUTHORS, with_tensor("0.0.linear.weight", torch.ones(())), CorruptCheckpoint, "has the shape (), and"),
        (AUTHORS, with_tensor("0.1.weight", torch.ones(())), CorruptCheckpoint, "has the shape ()"),
        (VLLM, without("token_map"), CorruptCheckpoint, "has no token_map"),
        (VLLM, with_tensor("token_map", torch.zeros(DRAFT_VOCAB).long()), CorruptCheckpoint, "different token ids"),
        (VLLM, with_tensor("token_map", draft_tokens() + 10**12), CorruptCheckpoint, "different token ids"),
        (VLLM, with_tensor("token_map", draft_tokens().float()), CorruptCheckpoint, "must be 24 whole numbers"),
        (VLLM, with_tensor("lm_heads.1.weight", torch.ones(3, WIDTH)), CorruptCheckpoint, "has the shape (3, 32)"),
        (VLLM, with_config(logit_scale=2.0), CorruptCheckpoint, "logit_scale must be 1"),
        (VLLM, with_config(num_hidden_layers=10**6), CorruptCheckpoint, "a whole number from 1 to 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(layout, how, kind, message, tmp_path, target):
    how(TINY[layout]()).write(tmp_path)
    assert message in refused(tmp_path, target, kind)


def test_it_is_recognised():
    assert recognise({"medusa_num_heads": 5}, frozenset()) == "Medusa"
    assert recognise({"model_type": "medusa"}, frozenset()) == "Medusa"
    assert recognise({"model_type": "llama"}, frozenset({"medusa_heads.0.0.linear.weight"})) == "Medusa"


def test_a_folder_without_weights_is_named(tmp_path, target):
    write_files(tmp_path, TINY[AUTHORS]().config, {"x": torch.ones(1)})
    (tmp_path / "model.safetensors").unlink()
    assert "has no model.safetensors" in refused(tmp_path, target, RedrafterError)


@pytest.fixture(scope="module")
def small():
    return load_target(make_model(dtype=torch.float32))


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """A drafter whose output embeddings have learned the text that the target writes at load."""
    made = TINY[AUTHORS]()
    net = read(made, tmp_path_factory.mktemp("before"), small).net
    text, first = conventions._written(small)
    tokens = torch.tensor(text)
    with torch.no_grad():
        features = net.features(small.states(tokens[None], (-1,))[0, first - 1 : -4])
    truth = torch.stack([tokens[first + 1 + h :][: features.shape[1]] for h in range(3)])
    optimiser = torch.optim.Adam([net.own], lr=0.05)
    for _ in range(60):
        loss = F.cross_entropy((features @ net.own.transpose(1, 2)).flatten(0, 1), truth.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    heads = {f"{h}.1.weight": net.own[h].detach().clone() for h in range(3)}
    return Tiny(made.config, made.tensors | heads, made.file).write(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("end", ["", "+ngram"])
def test_it_is_measured_and_loaded(end, small, trained):
    verdicts.forget()
    engine = redrafter.load(small.model, drafter=f"{trained}{end}", shape=Shape(width=3, length=3, nodes=7))
    for how in ({}, {"temperature": 1.0, "seed": 5}):
        done = engine.generate(PROMPTS, max_new_tokens=12, **how)
        plain = engine.plain().generate(PROMPTS, max_new_tokens=12, **how)
        assert [c.tokens for c in done] == [c.tokens for c in plain]
    assert sum(c.stats.nodes for c in done) > 0


def test_one_that_knows_nothing_is_refused(small, tmp_path):
    TINY[AUTHORS]().write(tmp_path)
    with pytest.raises(UnsupportedDrafter, match=r"Medusa in the layout of its authors.*the most frequent one"):
        redrafter.load(small.model, drafter=str(tmp_path))


def test_doctor_says_what_it_is(small, trained, tmp_path, capsys):
    small.model.save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--drafter", str(trained), "--device", "cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Medusa in the layout of its authors: 3 networks; guesses among all of 40 tokens" in out
