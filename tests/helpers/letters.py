"""A tiny target that speaks letters, and its data: what tests of training data share."""

from pathlib import Path

import tokenizers
import transformers

from redrafter import Engine
from redrafter.config import SamplingParams
from redrafter.drafters import NoDrafter
from redrafter.engine.request import Request
from redrafter.targets import Target, load_target
from redrafter.texts import Texts
from redrafter.train.config import DistillConfig
from tests.helpers.zoo import VOCAB, make_model

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"
END = VOCAB - 1
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SMALL = DistillConfig(texts=10, max_new_tokens=9, prompt_tokens=24, longest_prompt=70, tasks=0, shard=4, batch=3)
FILE = ["hello you there", "why is it so", "who are we", "what"]


def tokenizer(alphabet: str = ALPHABET, template: str | None = TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """Token i is the i-th letter; the last three are special."""
    special = ["<a>", "<u>", "<e>"]
    model = tokenizers.models.WordLevel({c: i for i, c in enumerate([*alphabet, *special])}, unk_token="a")
    raw = tokenizers.Tokenizer(model)
    raw.add_special_tokens(special)
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    raw.decoder = tokenizers.decoders.Fuse()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    made.chat_template = template
    return made


def make_target(template: str | None = TEMPLATE) -> Target:
    return load_target(make_model("llama", eos_token_id=END), tokenizer=tokenizer(template=template))


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def plain(target: Target, made: Texts, budget: int = SMALL.max_new_tokens) -> list[list[int]]:
    """Every row written again by the plain engine with the row's own prompt, seed and temperature."""
    engine = Engine(target, NoDrafter())
    rows = []
    for i in range(len(made)):
        prompt = made.row(i)[: made.prompts[i]].tolist()
        request = Request(
            prompt=prompt,
            max_new_tokens=budget,
            seed=int(made.seeds[i]),
            sampling=SamplingParams(temperature=float(made.temperatures[i])),
            eos=engine.eos_tokens(),
        )
        rows.append(prompt + engine.complete([request])[0].tokens)
    return rows


def rows(made: Texts) -> list[list[int]]:
    return [made.row(i).tolist() for i in range(len(made))]
