"""Local distillation: how the target goes on greedily after every token of a text, all of them at once."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.errors import ConfigError
from redrafter.targets import Target

MASK_ELEMENTS = 2**25
"""Bounds rows × tokens × slots of one pass: its mask."""
LOGIT_ELEMENTS = 2**27
"""Bounds rows × tokens × vocabulary of one pass: its logits."""
CHARACTERS = 2000
"""Longest piece that a given text is read in; a few hundred tokens in most languages."""


@torch.no_grad()
def roll_out(target: Target, tokens: Tensor, lengths: Tensor, depth: int) -> Tensor:
    """(B, S) texts padded right -> (B, S, T) int32: [b, t] is the target's greedy continuation of tokens[b, :t+1].

    One causal pass over the text, then T - 1 passes in which every position has its own next token.
    Rollout token d of position t stands in slot d·S + t, at position t + d, and sees its own text
    (slots up to t), its own earlier tokens (slots k·S + t) and itself. Nothing stops at an
    end-of-sequence token; places past a row's length hold nothing of use, -1.
    """
    batch, width = tokens.shape
    cache = KVCache(slots=width * depth)
    columns = max(1, min(width, LOGIT_ELEMENTS // (batch * target.vocab_size)))
    current = tokens.to(target.device, torch.int64)
    found = []
    for ahead in range(depth):
        chosen = []
        # Rollouts never see each other and the text is causal, so columns may come in portions.
        for first in range(0, width, columns):
            place = torch.arange(first, min(first + columns, width), device=target.device)  # (n,)
            slot = torch.arange((ahead + 1) * width, device=target.device)
            logits, _ = target.forward(
                current[:, place],
                (place + ahead).expand(batch, -1),
                (place + ahead * width).expand(batch, -1),
                rollout_visibility(place, ahead, width).expand(batch, -1, -1),
                (slot % width + slot // width).expand(batch, -1),
                cache,
                (),
            )
            chosen.append(logits.argmax(-1))
        current = torch.cat(chosen, 1)  # (B, S)
        found.append(current)
    outside = torch.arange(width, device=target.device) >= lengths.to(target.device)[:, None]
    return torch.stack(found, -1).masked_fill_(outside[:, :, None], -1).to(torch.int32)


def rollout_visibility(place: Tensor, ahead: int, width: int) -> Tensor:
    """(n, (ahead+1)·S) which slots the rollout token `ahead` of each place sees.

    >>> rollout_visibility(torch.arange(2), 1, 2).int().tolist()
    [[1, 0, 1, 0], [1, 1, 0, 1]]
    """
    slot = torch.arange((ahead + 1) * width, device=place.device)
    text = (slot < width) & (slot <= place[:, None])
    own = (slot >= width) & (slot % width == place[:, None])
    return text | own


def roll_out_rows(
    target: Target, rows: Sequence[Sequence[int]], depth: int, progress: Callable[[int], None] | None = None
) -> list[Tensor]:
    """(len(row), T) for each row on the CPU, a few rows of like length at a time."""
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found: dict[int, Tensor] = {}
    while by_length:
        width = len(rows[by_length[-1]])
        together = max(1, MASK_ELEMENTS // (width * width * depth))
        group = by_length[-together:]
        del by_length[-together:]
        padded = torch.tensor([[*rows[i], *[0] * (width - len(rows[i]))] for i in group])
        lengths = torch.tensor([len(rows[i]) for i in group])
        rollouts = roll_out(target, padded, lengths, depth).cpu()
        for i, own in zip(group, rollouts, strict=True):
            found[i] = own[: len(rows[i])].clone()
        if progress is not None:
            progress(int(lengths.sum()) * depth)
    return [found[i] for i in range(len(rows))]


def read_documents(path: Path) -> list[str]:
    """JSON lines with `text`, or plain text with blank lines between paragraphs; .gz too. Long ones in pieces."""
    try:
        content = path.read_bytes()
        raw = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the texts {path}: {error}") from error
    if not {".jsonl", ".json"} & set(path.suffixes):
        found = pieces(raw)
    else:
        found = []
        for number, line in enumerate(raw.splitlines(), start=1):
            if line.strip():
                try:
                    found += pieces(str(json.loads(line)["text"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"{path}, line {number}: expected an object with 'text' ({error!r})") from error
    if not found:
        raise ConfigError(f"{path} holds no texts")
    return found


def pieces(text: str, most: int = CHARACTERS) -> list[str]:
    """Whole paragraphs while they fit; a paragraph that does not is cut between words.

    >>> pieces("one two\\n\\nthree\\n\\nfour five six", 14)
    ['one two\\n\\nthree', 'four five six']
    >>> pieces("four five six", 9)
    ['four five', 'six']
    """
    found: list[str] = []
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        rest = paragraph.strip()
        if found and rest and len(found[-1]) + 2 + len(rest) <= most:
            found[-1] += "\n\n" + rest
            continue
        while rest:
            cut = len(rest) if len(rest) <= most else rest.rfind(" ", 1, most + 1)
            cut = most if cut < 0 else cut
            found.append(rest[:cut].rstrip())
            rest = rest[cut:].lstrip()
    return found
