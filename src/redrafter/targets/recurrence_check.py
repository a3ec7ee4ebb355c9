"""The self-check of a model with a recurrent state: trees, commits and pieces of prompts against its own decoding."""

from typing import Any

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.tree import Tree, pack_beam
from redrafter.targets.target import Target

PROMPTS = (12, 7)
"""Tokens of the two prompts."""
ACCEPTED = (3, 1)
"""Nodes that are committed between the two trees, the root included."""
WIDTH, LENGTH = 3, 3
TOGETHER = 0.05
"""A relative difference of logits that rounding explains in any dtype. A state that is left out gives a larger one."""


@torch.no_grad()
def recurrence_gap(target: Target) -> float:
    """The largest difference between our passes and the model's own, token by token with a cache of its own.

    Two ragged prompts are read, one of them in two pieces; then a tree is verified, a path committed, and a second tree
    verified. The model's prompt is a pass of many tokens here too: some models compute those a little differently.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randint(target.vocab_size, shape, generator=generator).to(target.device)

    texts = [random(n) for n in PROMPTS]
    cache = KVCache(slots=max(PROMPTS) + 2 * (WIDTH * LENGTH + 1))
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    first = min(PROMPTS) - 2
    target.prefill(padded[:, :first], [first] * len(PROMPTS), cache, ())
    target.prefill(padded[:, first:], [n - first for n in PROMPTS], cache, (), begin=first)
    lengths = torch.tensor(PROMPTS, device=target.device)
    gap = 0.0
    for _ in range(2):
        beam = random(len(texts), WIDTH, LENGTH)
        beam[:, 1, : LENGTH - 1] = beam[:, 0, : LENGTH - 1]  # siblings, so a state that a sibling changed is noticed
        tree, _ = pack_beam(beam, random(len(texts)))
        logits, _ = target.verify(tree, lengths, cache, ())
        for row, text in enumerate(texts):
            gap = max(gap, _gap(target, text, PROMPTS[row], tree, row, logits[row]))
        deepest = [leaves(tree, row)[-1] for row in range(len(texts))]
        path = torch.stack([tree.mask[row, node].nonzero()[:, 0] for row, node in enumerate(deepest)])
        count = torch.tensor(ACCEPTED, device=target.device)
        cache.commit(lengths, path, count)
        taken = [tree.tokens[row, path[row, :n]] for row, n in enumerate(ACCEPTED)]
        texts = [torch.cat(pair) for pair in zip(texts, taken, strict=True)]
        lengths = lengths + count
    return gap


def _gap(target: Target, text: Tensor, prompt: int, tree: Tree, row: int, logits: Tensor) -> float:
    """Of the logits (N+1, V) of a row's tree behind a text, whose first tokens are the prompt."""
    paths = [tree.mask[row, node].nonzero()[:, 0] for node in leaves(tree, row)]
    ends = torch.nn.utils.rnn.pad_sequence([tree.tokens[row, path] for path in paths], batch_first=True)
    wanted = stepped(target.model, prompt, torch.cat([text.expand(len(paths), -1), ends], 1))
    return max(
        relative_gap(wanted[i, len(text) - prompt :][: len(path)].to(target.device), logits[path])
        for i, path in enumerate(paths)
    )


def stepped(model: Any, prompt: int, tokens: Tensor) -> Tensor:
    """Texts (B, S) -> the model's own logits (B, S - prompt, V) of all tokens behind the prompt, one at a time."""
    out = model(input_ids=tokens[:, :prompt], use_cache=True)
    name = "past_key_values" if "past_key_values" in out else "cache_params"
    logits = []
    for place in range(prompt, tokens.shape[1]):
        given = {name: out[name]}
        if name == "past_key_values":  # there is attention: as `generate` does
            given["position_ids"] = torch.full_like(tokens[:, :1], place)
            given["attention_mask"] = torch.ones_like(tokens[:, : place + 1])
        out = model(input_ids=tokens[:, place : place + 1], use_cache=True, **given)
        logits.append(out.logits[:, -1])
    return torch.stack(logits, 1)


@torch.no_grad()
def reads_together(target: Target) -> bool:
    """Whether a text that is read in two pieces, each at once, has the states of the whole text."""
    tokens = torch.randint(target.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0)).to(target.device)
    every = torch.arange(16, device=target.device)
    whole, _ = target.read(tokens, 0, KVCache(slots=16), (), every)
    cache = KVCache(slots=16)
    target.read(tokens[:, :8], 0, cache, (), every[:8])
    pieces, _ = target.read(tokens[:, 8:], 8, cache, (), every[:8])
    return relative_gap(whole[0, 8:], pieces[0]) <= TOGETHER  # of all tokens: the first ones need the state most


def leaves(tree: Tree, row: int) -> list[int]:
    """The leaves of a tree: their paths cover all nodes."""
    inner = set(tree.parents[row, 1:].tolist())
    return [n for n in range(tree.nodes + 1) if bool(tree.valid[row, n]) and n not in inner]


def relative_gap(logits: Tensor, other: Tensor) -> float:
    """Largest distance between rows of two (n, V) tensors, relative to the row's spread; inf if it is not a number."""
    logits, other = logits.double(), other.double()
    spread = (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)
    gap = float(((logits - other).norm(dim=-1) / spread).max())
    return gap if gap == gap else float("inf")
