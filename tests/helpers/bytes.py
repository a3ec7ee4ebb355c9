"""A tiny target whose tokenizer is a byte-level BPE: what tests of grammars share, since grammars are about bytes."""

from collections.abc import Sequence
from typing import Any

import tokenizers
import transformers

from redrafter.targets import Target, load_target
from tests.helpers.zoo import make_model

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<end>", "<user>", "<assistant>", "<system>", "[TOOL_CALLS]"]
TEXTS = ['{"name": "Ada", "age": 36, "tags": ["x", "y"], "name": null, "age": 1}'] * 8 + [
    "yes no name age tags true false"
]
VOCAB = 320


def byte_tokenizer(template: str = TEMPLATE, special: Sequence[str] = SPECIAL) -> transformers.PreTrainedTokenizerFast:
    """All 256 bytes, some merges that cross the borders of JSON's own tokens, and some special tokens.

    The first special token ends a text.
    """
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[0])
    made.chat_template = template
    return made


def byte_target(template: str = TEMPLATE, special: Sequence[str] = SPECIAL, **changes: Any) -> Target:
    tokenizer = byte_tokenizer(template, special)
    model = make_model("llama", **({"vocab_size": VOCAB, "eos_token_id": 0, "max_position_embeddings": 512} | changes))
    return load_target(model, tokenizer=tokenizer)
