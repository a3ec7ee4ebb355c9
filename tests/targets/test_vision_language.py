"""Checkpoints of models that also read images: loaded for text, they write what transformers writes."""

import pytest
import safetensors.torch
import torch
import transformers as tf

import redrafter
from benchmarks.architectures import compared, own_texts
from benchmarks.tiny_configs import tiny_config, tiny_model
from redrafter.engine.encode import check_message
from redrafter.errors import ConfigError, CorruptCheckpoint, UnsupportedTarget
from redrafter.targets import load_target
from redrafter.targets.media_tokens import media_tokens

pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = {"qwen2_5_vl": "visual", "gemma3": "vision_tower", "mistral3": "vision_tower", "llama4": "vision_model"}


def whole(model_type):
    return tiny_model(model_type, torch.float64, tf.AutoModelForMultimodalLM)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Qwen2.5-VL: the model, and the folder of its checkpoint."""
    model = whole("qwen2_5_vl")
    folder = tmp_path_factory.mktemp("seeing")
    model.save_pretrained(folder)
    return model, folder


def weights_of(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def rewrite(folder, weights):
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("model_type", PARTS)
def test_a_folder_loads_for_text(model_type, tmp_path):
    model = whole(model_type)
    model.save_pretrained(tmp_path)
    kept = {k: v for k, v in weights_of(tmp_path).items() if PARTS[model_type] not in k}
    assert len(kept) < len(weights_of(tmp_path))
    rewrite(tmp_path, kept)  # what is not there cannot be read
    target = load_target(tmp_path, dtype="fp64", device="cpu")
    assert type(target.model) is type(model)
    row = compared(target, own_texts(model))
    assert row["result"] == "equal"
    assert row["tokens_per_step"] > 1.3
    assert not any(PARTS[model_type] in name for name, _ in target.model.named_parameters())


def test_a_users_own_model_keeps_its_eyes(seeing):
    model, _ = seeing
    target = load_target(model)
    assert compared(target, own_texts(model))["result"] == "equal"
    target.release()
    assert model.model.visual is not None


def test_weights_of_the_language_model_that_are_missing_are_an_error(seeing, tmp_path):
    """transformers would make random ones in their place."""
    model, _ = seeing
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, {k: v for k, v in weights_of(tmp_path).items() if "layers.2.mlp.down_proj" not in k})
    with pytest.raises(CorruptCheckpoint, match=r"lack 1 weights of the language model: .*layers\.2\.mlp\.down_proj"):
        load_target(tmp_path, dtype="fp64", device="cpu")


def test_positions_of_another_axis_are_another_text(seeing, monkeypatch):
    """A twin: the axes of a text's positions are equal."""
    model, _ = seeing
    texts, rotary = own_texts(model), type(model.model.language_model.rotary_emb)
    forward = rotary.forward

    def shifted(self, x, position_ids):
        apart = position_ids.expand(3, *position_ids.shape[-2:]).clone()
        apart[1] += 5 * (torch.arange(apart.shape[-1]) % 2)
        return forward(self, x, apart)

    target = load_target(model)
    monkeypatch.setattr(rotary, "forward", shifted)
    assert compared(target, texts)["result"] == "wrong"


def test_images_in_prompts_are_refused_by_name(seeing):
    model, _ = seeing
    engine = redrafter.load(model, drafter=None)
    token = model.config.image_token_id
    with pytest.raises(ConfigError, match=f"the token {token}, the place of an image.*reads text only"):
        engine.generate([[3, token, 5]], max_new_tokens=2)
    with pytest.raises(ConfigError, match="a part of the type 'image': only text is read"):
        check_message({"role": "user", "content": [{"type": "image", "url": "x.png"}, {"type": "text", "text": "?"}]})
    check_message({"role": "user", "content": [{"type": "text", "text": "?"}]})


def test_a_model_that_is_no_causal_lm_is_refused_by_its_type(tmp_path):
    tf.T5Config(vocab_size=40, d_model=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTarget, match="no causal LM of the model type t5"):
        load_target(tmp_path, dtype="fp32", device="cpu")


def test_kinds_of_layers_are_refused_before_weights_are_read(tmp_path):
    tiny_config("deepseek_v4").save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(UnsupportedTarget, match="keeps no keys for each token but keys that stand for"):
        load_target(tmp_path, dtype="fp32", device="cpu")


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_it_is_not_quantised(seeing, scheme):
    with pytest.raises(
        UnsupportedTarget, match="quantised models that also read images are not read; use the model in 16"
    ):
        load_target(seeing[1], dtype=scheme, device="cpu")


def test_media_tokens_of_a_configuration_inside_another():
    config = tf.Qwen2_5OmniConfig()
    inner = config.thinker_config
    wanted = {inner.image_token_id: "image", inner.video_token_id: "video", inner.audio_token_id: "audio"}
    assert media_tokens(config) == media_tokens(inner) == wanted
    assert media_tokens(config.get_text_config()) == {}
