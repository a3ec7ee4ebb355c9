"""Small random models of many architectures, and drafters whose skill is known."""

from typing import Any

import torch
import transformers as tf

from benchmarks.oracle import OracleDrafter as OracleDrafter
from redrafter.drafters import checkpoint
from redrafter.drafters.base import DrafterNet, NetDrafter
from redrafter.drafters.eagle import EagleConfig, EagleNet
from redrafter.drafters.load import bind
from redrafter.drafters.medusa import MedusaConfig, MedusaNet
from redrafter.drafters.options import DrafterOptions
from redrafter.drafters.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentNet
from redrafter.targets import Target

VOCAB = 40
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _config(kind: str) -> Any:
    match kind:
        case "llama":
            return tf.LlamaConfig(**COMMON)
        case "qwen2":
            return tf.Qwen2Config(**COMMON)
        case "qwen2-mixed":
            types = ["full_attention", "sliding_attention"]
            return tf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=6, layer_types=types)
        case "qwen3":
            return tf.Qwen3Config(**COMMON, head_dim=8)
        case "mistral":
            return tf.MistralConfig(**COMMON, sliding_window=6)
        case "gemma3":
            types = ["sliding_attention", "full_attention"]
            # Tied, its scaled embeddings would make a random model repeat its last token for ever.
            untied = COMMON | {"tie_word_embeddings": False}
            return tf.Gemma3TextConfig(**untied, head_dim=8, sliding_window=6, layer_types=types)
        case "gpt-neox":
            return tf.GPTNeoXConfig(**{k: v for k, v in COMMON.items() if k != "num_key_value_heads"})
        case "gpt2":
            return tf.GPT2Config(
                vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96, bos_token_id=None, eos_token_id=None
            )
        case "phi3":
            return tf.Phi3Config(**COMMON)
        case "granite":
            scales = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0}
            return tf.GraniteConfig(**COMMON, **scales, attention_multiplier=0.3)
        case "smollm3":  # the second layer has no rotary embedding
            return tf.SmolLM3Config(**COMMON, no_rope_layer_interval=2)
        case "olmo2":
            return tf.Olmo2Config(**COMMON)
        case "mixtral":
            return tf.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
        case "qwen3-moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
            return tf.Qwen3MoeConfig(**COMMON, **experts)
    raise ValueError(kind)


ARCHITECTURES = (
    "llama", "qwen2", "qwen2-mixed", "qwen3", "mistral", "gemma3", "gpt-neox", "gpt2", "phi3", "olmo2",
    "mixtral", "qwen3-moe",
)  # fmt: skip

_made: dict[tuple[str, torch.dtype], Any] = {}


def make_model(kind: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Weights large enough that texts vary; the same each time."""
    key = (kind, dtype)
    if not changes and key in _made:
        return _made[key]
    config = _config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(7)
    model = tf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if "moe" in kind or kind == "mixtral":
        model.set_experts_implementation("eager")  # the fused ones have no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    if not changes:
        _made[key] = model
    return model


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [2, 7, 1], [1, 6, 1, 8, 0, 3]]
"""Five ragged prompts; token 0 (also the pad id) is an ordinary token."""


def recurrent_drafter(target: Target, **changes: Any) -> RecurrentDrafter:
    """Random weights: rarely right at T = 0, often right at T = 1, where the noise is shared."""
    hidden = target.hidden_size
    shape: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "context_size": hidden,
        "embedding_size": hidden,
        "state_size": hidden,
        "exit_size": 24,
    }
    torch.manual_seed(11)
    return RecurrentDrafter(RecurrentNet(RecurrentConfig(**(shape | changes))), target)


def peer_drafter(kind: str, target: Target, **changes: Any) -> NetDrafter[Any]:
    """A peer of the recurrent drafter with random weights."""
    hidden = target.hidden_size
    shape: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "context_size": hidden,
        "embedding_size": hidden,
        "exit_size": 24,
        "heads": 4,
    }
    torch.manual_seed(11)
    if kind == "medusa":
        net: DrafterNet = MedusaNet(MedusaConfig(**(shape | changes)))
    elif kind == "eagle":
        net = EagleNet(EagleConfig(**(shape | {"head_size": 8} | changes)))
    else:
        options = DrafterOptions(
            drafter=kind, **({"exit_size": 24, "heads": 4, "draft_vocab": 0, "blocks": 2} | changes)
        )
        net = checkpoint.make(options.config_for(target))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.2)
    return bind(net, target)
