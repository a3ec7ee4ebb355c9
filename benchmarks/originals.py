"""Runs the original implementations of drafters on the tiny checkpoints: the golden values of `benchmarks/formats.py`.

    python benchmarks/originals.py --checkouts FOLDER

FOLDER holds checkouts of the public repositories, each in a folder with the repository's name (EAGLE, SpecForge, ...).
Their code is imported from there, and none of it is kept here. An original that cannot be imported is left out.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/originals.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import importlib
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from benchmarks.common import bare_arguments
from benchmarks.formats import GOLDEN
from benchmarks.tiny_drafters import (
    DRAFT_VOCAB,
    LAYERS,
    MODULES,
    PROMPT,
    TINY,
    VOCAB,
    WIDTH,
    Tiny,
    TinyTarget,
    states,
    text,
)

STEPS = 3
checkouts = Path()
"""The folder with the repositories; the command line sets it."""


def eagle3(tiny: Tiny) -> Tensor:
    """EAGLE, eagle/model/cnets.py: `Model`."""
    module = _imported("eagle.model.cnets")
    config = SimpleNamespace(**tiny.config, pad_token_id=None, pretraining_tp=1)
    model = module.Model(config).float().eval()
    embedding = {"embed_tokens.weight": TinyTarget().input_embedding.weight}
    model.load_state_dict(tiny.tensors | embedding)
    model.reset()
    tokens, hidden = text(), states(3)
    out, cache = model(hidden[:, :PROMPT], input_ids=tokens[:, 1 : PROMPT + 1], use_cache=True)
    logits = []
    for step in range(STEPS):
        logits.append(model.lm_head(model.norm(out[:, -1])))
        at = PROMPT + 1 + step
        out, cache = model(out[:, -1:], input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True)
    return torch.cat(logits)


def specforge(tiny: Tiny) -> Tensor:
    """SpecForge, specforge/modeling/draft/llama3_eagle.py: `LlamaForCausalLMEagle3`, as its trainer unrolls it."""
    from transformers import LlamaConfig

    module = _imported("specforge.modeling.draft.llama3_eagle")
    rope = tiny.config["rope_scaling"] | {"rope_theta": tiny.config["rope_theta"]}
    plain = {k: v for k, v in tiny.config.items() if k not in ("rope_scaling", "rope_theta")}
    config = LlamaConfig(**plain, rope_parameters=rope, pad_token_id=None)
    model = module.LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
    embedding = {"embed_tokens.weight": TinyTarget().input_embedding.weight}
    model.load_state_dict(tiny.tensors | embedding)
    tokens = text()
    hidden = model.project_hidden_states(states(3)[:, :PROMPT])
    mask = module.prepare_decoder_attention_mask(torch.ones(1, PROMPT, dtype=torch.bool), (1, PROMPT), hidden, 0)
    cache: list[list[Tensor]] = [[], []]
    logits = []
    for step in range(STEPS):
        hidden = model.backbone(
            input_embeds=model.embed_input_ids(tokens[:, 1 + step : PROMPT + 1 + step]),
            hidden_states=hidden,
            cache_hidden=cache,
            attention_mask=mask,
            position_ids=torch.arange(PROMPT)[None],
        )
        logits.append(model.compute_logits(hidden)[:, -1])
    return torch.cat(logits)


def speculators_eagle3(tiny: Tiny) -> Tensor:
    """speculators, src/speculators/models/eagle3/core.py: `Eagle3DraftModel`."""
    module = _imported("speculators.models.eagle3.core")
    model = _speculator(module.Eagle3DraftModel, module.Eagle3SpeculatorConfig, tiny)
    found = _outputs_of(model.lm_head)
    tokens = text()[:, 1:]  # its texts come shifted
    model(
        hidden_states=states(3)[:, :-1],
        input_ids=tokens,
        document_ids=torch.zeros_like(tokens),
        ttt_steps=STEPS,
    )
    return torch.cat([out[:, PROMPT - 1] for out in found])


def dflash(tiny: Tiny) -> Tensor:
    """dflash, dflash/model.py: `DFlashDraftModel`."""
    return _dflash(_from_file("dflash", "dflash/model.py"), tiny, causal=False)


def jetspec(tiny: Tiny) -> Tensor:
    """JetSpec, jetspec/models/draft_head.py: `DFlashDraftModel` with a causal head."""
    return _dflash(_from_file("JetSpec", "jetspec/models/draft_head.py"), tiny, causal=True)


def _from_file(repository: str, path: str) -> Any:
    """A module whose package would import more than is installed."""
    found = importlib.util.spec_from_file_location(f"original_{repository}", checkouts / repository / path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _qwen3(tiny: Tiny) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(**{k: v for k, v in tiny.config.items() if k not in ("architectures", "model_type")})
    config._attn_implementation = "sdpa"
    return config


def _dflash(module: Any, tiny: Tiny, causal: bool) -> Tensor:
    model = module.DFlashDraftModel(_qwen3(tiny)).float().eval()
    model.load_state_dict(tiny.tensors)
    slots, target = tiny.config["block_size"], TinyTarget()
    block = torch.full((1, slots), tiny.config["dflash_config"]["mask_token_id"])
    block[:, 0] = text()[:, PROMPT]
    out = model(
        target_hidden=states(3)[:, :PROMPT],
        noise_embedding=target.input_embedding(block),
        position_ids=torch.arange(PROMPT + slots)[None],
        past_key_values=DynamicCache(),
        use_cache=True,
        is_causal=causal,
    )
    logits: Tensor = target.output_embedding(out[0, 1 : 1 + STEPS])
    return logits


def dspark(tiny: Tiny) -> Tensor:
    """DeepSpec, deepspec/modeling/dspark/qwen3/modeling.py: `Qwen3DSparkModel`."""
    model = _imported("deepspec.modeling.dspark.qwen3.modeling").Qwen3DSparkModel(_qwen3(tiny)).float().eval()
    model.load_state_dict(tiny.tensors)
    slots, tokens = tiny.config["block_size"], text()
    block = torch.full((1, slots), tiny.config["mask_token_id"])
    block[:, 0] = tokens[:, PROMPT]
    out = model._forward_backbone(
        target_hidden_states=states(3)[:, :PROMPT],
        noise_embedding=model.embed_tokens(block),
        position_ids=torch.arange(PROMPT + slots)[None],
        past_key_values=DynamicCache(),
        use_cache=True,
    )
    logits = model.markov_head.apply_block_logits(
        model.compute_logits(out)[:, None],
        token_ids=tokens[:, None, PROMPT : PROMPT + slots],
        hidden_states=out[:, None],
    )
    found: Tensor = logits[0, 0, :STEPS]
    return found


def speculators_dflash(tiny: Tiny) -> Tensor:
    """speculators, src/speculators/models/dflash/core.py: `DFlashDraftModel`."""
    module = _imported("speculators.models.dflash.core")
    return _speculators_block(_speculator(module.DFlashDraftModel, module.DFlashSpeculatorConfig, tiny), tiny, 1)


def speculators_dspark(tiny: Tiny) -> Tensor:
    """speculators, src/speculators/models/dspark/core.py: `DSparkDraftModel`."""
    module = _imported("speculators.models.dspark.core")
    return _speculators_block(_speculator(module.DSparkDraftModel, module.DSparkSpeculatorConfig, tiny), tiny, 0)


def _speculators_block(model: Any, tiny: Tiny, first: int) -> Tensor:
    """The training pass, with one block behind the prompt."""
    tokens, slots = text(), tiny.config["block_size"]
    at = torch.zeros_like(tokens)
    at[:, PROMPT] = 1
    hidden, logits, *_ = model._backbone_forward(
        hidden_states=states(3),
        input_ids=tokens,
        loss_mask=at,
        verifier_last_hidden_states=states(1),
        document_ids=torch.zeros_like(tokens),
        max_anchors=1,
    )
    if getattr(model, "markov_head", None) is not None:
        before = tokens[:, PROMPT : PROMPT + slots]
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    found: Tensor = logits[0, first : first + STEPS]
    return found


def _speculator(model: Any, config: Any, tiny: Tiny) -> Any:
    described = config(**{k: v for k, v in tiny.config.items() if k != "architectures"})
    described.transformer_layer_config._attn_implementation = "sdpa"  # its eager masks let guesses see others
    made = model(described).float().eval()
    missing, extra = made.load_state_dict(tiny.tensors, strict=False)
    assert not extra, extra
    assert all(name.startswith(("verifier_", "embed_tokens", "lm_head")) for name in missing), missing
    return made


def medusa(tiny: Tiny) -> Tensor:
    """Medusa, medusa/model/medusa_model.py: `MedusaModelABC.medusa_head`."""
    module = _imported("medusa.model.medusa_model")
    block = module.ResBlock
    count = 1 + max(int(name.split(".")[0]) for name in tiny.tensors)
    heads = torch.nn.ModuleList(
        torch.nn.Sequential(block(WIDTH), torch.nn.Linear(WIDTH, VOCAB, bias=False)) for _ in range(count)
    )  # as its constructor puts them together, which also loads a base model
    heads.load_state_dict(tiny.tensors)
    return torch.stack([head(states(1)[0, PROMPT - 1]) for head in heads])


def transformers_mtp(tiny: Tiny) -> Tensor:
    """transformers, modeling_layers.py: `MtpModel`."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    with tempfile.TemporaryDirectory() as scratch:
        config = AutoConfig.from_pretrained(tiny.write(Path(scratch)))
        AutoModelForCausalLM.from_config(config).save_pretrained(scratch)
        path = Path(scratch) / tiny.file
        save_file(load_file(path) | tiny.tensors, path, metadata={"format": "pt"})
        main_model = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32, attn_implementation="sdpa")
        main_model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
        model = MtpModel.from_pretrained(main_model).float().eval()
    layer = model.layers[0]

    def run(embedded: Tensor, hidden: Tensor, turn: Any) -> Tensor:
        found: Tensor = layer(embedded, hidden, turn, None, None, None)
        return found

    return _unrolled(run, model.rotary_emb)


def speculators_mtp(tiny: Tiny) -> Tensor:
    """speculators, src/speculators/models/mtp/model_definitions.py: `Qwen35MTPLayer`."""
    module = _imported("speculators.models.mtp.model_definitions")
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    config = AutoConfig.for_model(**tiny.config)
    config._attn_implementation = "sdpa"
    layer = module.Qwen35MTPLayer(config).float().eval()
    names = {
        "mtp.layers.0.": "",
        "mtp.fc.": "input_proj.",
        "mtp.norm.": "final_layernorm.",
        "mtp.pre_fc_norm_embedding.": "token_layernorm.",
        "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
    }
    tensors = {
        name.replace(theirs, own): tensor
        for name, tensor in tiny.tensors.items()
        for theirs, own in names.items()
        if name.startswith(theirs)
    }
    layer.load_state_dict(tensors)

    def run(embedded: Tensor, hidden: Tensor, turn: Any) -> Tensor:
        found: Tensor = layer(hidden, embedded, position_embeddings=turn)
        return found

    return _unrolled(run, Qwen3_5TextRotaryEmbedding(config))


def _unrolled(run: Callable[[Tensor, Tensor, Any], Tensor], rotary: Any) -> Tensor:
    """A module that guesses behind the prompt; each guess reads the output of the one before."""
    hidden, tokens, target = states(1)[:, :PROMPT], text(), TinyTarget()
    logits = []
    for _ in range(STEPS):
        count = hidden.shape[1]
        embedded = target.input_embedding(tokens[:, 1 : count + 1])
        out = run(embedded, hidden, rotary(hidden, torch.arange(count)[None]))[:, -1:]
        logits.append(target.output_embedding(out[:, 0]))
        hidden = torch.cat([hidden, out], 1)
    return torch.cat(logits)


def _imported(name: str) -> Any:
    return importlib.import_module(name)


def _outputs_of(module: Any) -> list[Tensor]:
    """What the module gives from now on."""
    found: list[Tensor] = []
    module.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    return found


ORIGINALS: dict[str, tuple[str, Callable[[Tiny], Tensor]]] = {
    "EAGLE-3, EAGLE": ("EAGLE", eagle3),
    "EAGLE-3, SpecForge": ("SpecForge", specforge),
    "EAGLE-3, speculators": ("speculators/src", speculators_eagle3),
    "DFlash": ("dflash", dflash),
    "DFlash, speculators": ("speculators/src", speculators_dflash),
    "DSpark": ("DeepSpec", dspark),
    "DSpark, recurrent Markov head": ("DeepSpec", dspark),
    "DSpark, speculators": ("speculators/src", speculators_dspark),
    "JetSpec": ("JetSpec", jetspec),
    "Medusa": ("Medusa", medusa),
    "MTP, DeepSeek-V3": (".", transformers_mtp),
    "MTP, GLM-4.5": (".", transformers_mtp),
    "MTP, Qwen3.5": ("speculators/src", speculators_mtp),
}
"""Name of a format -> where in the checkouts its original is, and what runs it."""


def stand_in() -> None:
    """For what originals import and a forward pass does not need: metadata, data loaders, models for older versions."""
    known = importlib.metadata.version
    stand_in: Any = lambda name: "0" if name == "speculators" else known(name)  # noqa: E731
    importlib.metadata.version = stand_in
    for name in ("datasets", "hs_connectors"):
        sys.modules.setdefault(name, MagicMock())
    base: Any = SimpleNamespace(**dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM"), torch.nn.Identity))
    for name in ("llama", "mistral"):
        sys.modules.setdefault(f"medusa.model.modeling_{name}_kv", base)


@torch.no_grad()
def main() -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder with the repositories")
    parser.add_argument(
        "--only", nargs="*", default=list(ORIGINALS), help="formats to run; the others stay as they are"
    )
    args = parser.parse_args()
    global checkouts
    checkouts = args.checkouts
    stand_in()
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for name in args.only:
        folder, run = ORIGINALS[name]
        sys.path.insert(0, str(args.checkouts / folder))
        logits = run((TINY | MODULES)[name]())
        sys.path.pop(0)
        assert logits.shape[0] == STEPS
        assert logits.shape[1] in (VOCAB, DRAFT_VOCAB, WIDTH)
        about = " ".join((run.__doc__ or "").split()).rstrip(".")
        golden[name] = {"original": about, "logits": [[float(f"{x:.7g}") for x in row] for row in logits.tolist()]}
        print(f"{name}: {about}")
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
