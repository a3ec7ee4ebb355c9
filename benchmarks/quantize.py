"""What rounding the weights changes: perplexity, and the share of greedy choices that stay the same.

    python benchmarks/quantize.py

The texts are the first pieces of news articles. At each of their positions the model is asked for the next token, in
fp32 and bf16, and from the folders that `redrafter quantize` writes in int4 and fp8, which compute in fp32. `equal_*`
is the share of positions at which the most probable token is the same.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/quantize.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import math
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.common import HERE, arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.targets.default import default_model
from redrafter.targets.load import parse_dtype
from redrafter.targets.pretrained import load_parts
from redrafter.targets.quantised.nearest import SCHEMES
from redrafter.targets.quantised.write import quantise_folder

ARTICLES = HERE / "data" / "cnn_dm.jsonl"
INSTRUCTION = "Summarize: "
REFERENCES = ("fp32", "bf16")


def smoke(tiny: TinyFiles) -> list[object]:
    return ["--model", tiny.model, "--questions", tiny.questions, "--texts", 2, "--tokens", 16]


@torch.no_grad()
def read_texts(model: Any, texts: list[list[int]], name: str) -> tuple[float, list[Tensor]]:
    """The perplexity of all tokens but the first, and the greedy choice at each position."""
    loss, count, choices = 0.0, 0, []
    for ids in track(texts, name):
        tokens = torch.tensor([ids], device=model.device)
        logits = model(tokens).logits[0, :-1].float()
        loss += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        count += len(ids) - 1
        choices.append(logits.argmax(-1).cpu())
    return math.exp(loss / count), choices


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "quantize.json")
    parser.set_defaults(questions=ARTICLES)
    parser.add_argument("--model", help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64, help="of each text, at most")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    source = str(args.model or default_model())
    rows: list[dict[str, Any]] = []
    chosen: dict[str, list[Tensor]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("fp32", *SCHEMES, "bf16"):
            row: dict[str, Any] = {"weights": name}
            folder, dtype = source, name
            if name in SCHEMES:
                folder, dtype, began = str(Path(scratch, name)), "fp32", time.perf_counter()
                written = quantise_folder(source, Path(folder), name)
                row |= {"layers": written.layers, "group": written.size, "bytes": written.bytes_after}
                row["seconds"] = round(time.perf_counter() - began, 1)
            model, tokenizer = load_parts(folder, parse_dtype(dtype, args.device), None, {})
            texts = pieces(tokenizer, args.questions, args.texts, args.tokens)
            row["perplexity"], chosen[name] = read_texts(model.to(args.device), texts, name)
            rows.append(row | {"texts": len(texts), "positions": sum(map(len, chosen[name]))})
            for each in rows:
                each |= {f"equal_{of}": equal(chosen[each["weights"]], chosen[of]) for of in REFERENCES if of in chosen}
            write_results(args.save, headline(rows), rows)  # after each, so that an interrupted run keeps them
            print(rows[-1], flush=True)
    print(headline(rows))


def pieces(tokenizer: Any, file: Path, count: int, tokens: int) -> list[list[int]]:
    """The first pieces of all articles, as many of each as are needed."""
    articles = [tokenizer(q.text.removeprefix(INSTRUCTION))["input_ids"] for q in read_questions(file, count)]
    of_each = -(-count // len(articles))
    cut = [ids[at * tokens : (at + 1) * tokens] for ids in articles for at in range(of_each)]
    return [ids for ids in cut if len(ids) > 1][:count]


def equal(choices: list[Tensor], others: list[Tensor]) -> float:
    """The share of positions at which both chose the same token."""
    same = sum(int((a == b).sum()) for a, b in zip(choices, others, strict=True))
    return same / sum(map(len, choices))


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = {f"perplexity_{row['weights']}": round(row["perplexity"], 4) for row in rows}
    pairs = [(row, of) for row in rows for of in REFERENCES if of != row["weights"] and f"equal_{of}" in row]
    return found | {f"{row['weights']}_equal_{of}": round(row[f"equal_{of}"], 4) for row, of in pairs}


if __name__ == "__main__":
    main()
