"""Small random mlx-lm models of many families, and drafters whose skill is known."""

import importlib
import random
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from redrafter_mlx.beam import Search
from redrafter_mlx.config import Shape
from redrafter_mlx.drafter import RecurrentDrafter
from redrafter_mlx.network import RecurrentConfig, RecurrentNet
from redrafter_mlx.tree import Tree, last_tokens, pack_beam, root_tree

VOCAB = 40
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 200,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "mistral-window": ("llama", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("phi3", {"head_dim": None}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "moe_intermediate_size": 32, "norm_topk_prob": True,
        },
    ),
}  # fmt: skip

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [2, 7, 1], [1, 6, 1, 8, 0, 3]]
"""Five ragged prompts."""

_made: dict[str, Any] = {}


def make_model(family: str = "llama", fresh: bool = False, **changes: Any) -> Any:
    """Weights large enough that texts vary; the same each time."""
    if family in _made and not fresh and not changes:
        return _made[family]
    module, options = FAMILIES[family]
    found = importlib.import_module(f"mlx_lm.models.{module}")
    args = COMMON | {"model_type": module} | options | changes
    model = found.Model(found.ModelArgs.from_dict({k: v for k, v in args.items() if v is not None}))
    keys = iter(mx.random.split(mx.random.key(7), 4096))
    model.update(
        tree_map(lambda w: mx.random.normal(w.shape, key=next(keys)) * 0.3 if w.ndim > 1 else w, model.parameters())
    )
    model.eval()
    mx.eval(model.parameters())
    if not changes and not fresh:
        _made[family] = model
    return model


class OracleDrafter:
    """Knows the texts. Right with probability `skill` at each guess; candidates 1.. are noise."""

    name = "oracle"
    layers: tuple[int, ...] = ()
    default_shape = Shape(width=3, length=4)

    def __init__(self, prompts: list[list[int]], texts: list[list[int]], skill: float) -> None:
        self.truth = {tuple(p): p + t for p, t in zip(prompts, texts, strict=True)}
        self.skill, self.random = skill, random.Random(3)

    def begin(self, prompts, hidden):
        return [(self.truth[tuple(p)], len(p)) for p in prompts]

    def draft(self, state, texts, search: Search) -> Tree:
        beams = []
        for text, known in state:
            right = (text + [0] * 64)[known : known + search.shape.length]
            beams.append([])
            for width in range(search.shape.width):
                skill = self.skill if width == 0 else 0.4
                beams[-1].append([t if self.random.random() < skill else self.random.randrange(VOCAB) for t in right])
        return pack_beam(mx.array(beams), last_tokens(texts), search.shape.budget)[0]

    def advance(self, state, tokens, hidden):
        return [(text, known + len(new)) for (text, known), new in zip(state, tokens, strict=True)]

    def keep(self, state, rows):
        return [state[row] for row in rows]


class EmptyDrafter(OracleDrafter):
    """Guesses nothing, but through the same step."""

    def draft(self, state, texts, search):
        return root_tree(texts)


def recurrent_drafter(target: Any, ngrams: bool = True, head: str = "tied", **options: Any) -> RecurrentDrafter:
    """Random weights: bad guesses, a real state, memory and draft vocabulary."""
    sizes = {"vocab_size": VOCAB, "embedding_size": target.hidden_size, "context_size": 2 * target.hidden_size}
    config = RecurrentConfig(
        **sizes, layers=(1, -1), state_size=32, exit_size=24, cell="gated", first_state="context", head=head,
        normed=True, memory_heads=2, memory_size=8, draft_vocab_size=30, **options,
    )  # fmt: skip
    keys = iter(mx.random.split(mx.random.key(1), 64))
    net = RecurrentNet(config)
    net.update(tree_map(lambda w: mx.random.normal(w.shape, key=next(keys)) * 0.4, net.parameters()))
    net.token_ids = mx.arange(2, 32)
    net.cast(target.dtype)
    return RecurrentDrafter(net, target.embed, target.output_rows(net.token_ids), ngrams)
