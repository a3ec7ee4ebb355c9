"""A draft model made of the target's first layers, distilled on the target's own texts.

The embeddings and the head are those of the target and stay frozen; the layers and the last norm are trained.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.texts import Texts


def shorten(target: Target, layers: int) -> Any:
    """Return a transformers model with copies of the target's first layers."""
    whole = target.model
    count = whole.config.num_hidden_layers
    if not 1 <= layers < count:
        raise ConfigError(f"layers must be in 1..{count - 1}, got {layers}")
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model = type(whole)(config)
    missing, _ = model.load_state_dict(whole.state_dict(), strict=False)
    if missing:
        raise ConfigError(f"the layers of {target.name} cannot be copied: no weights found for {missing[0]}")
    model.generation_config = whole.generation_config
    return model.to(target.device).eval()


def trained_parts(model: Any) -> list[torch.nn.Parameter]:
    """Return the trained parameters: all but the embeddings and the head."""
    shared = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    return [p for p in model.parameters() if id(p) not in shared]


def batches(texts: Texts, size: int, longest: int, seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function: update -> tokens (B, n), padded on the right, and a mask (B, n) of the target's own tokens."""

    def batch(update: int) -> tuple[Tensor, Tensor]:
        order = torch.Generator().manual_seed(seed * 1_000_003 + update)
        chosen = torch.randint(len(texts), (size,), generator=order).tolist()
        rows = [texts.row(i)[:longest].long() for i in chosen]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        place = torch.arange(tokens.shape[1])
        lengths, prompts = torch.tensor([len(r) for r in rows]), texts.prompts[chosen]
        return tokens, (place >= prompts[:, None]) & (place < lengths[:, None])

    return batch


def distill(
    model: Any,
    target: Target,
    texts: Texts,
    *,
    updates: int,
    batch_size: int = 4,
    longest: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
    report: Callable[[int, float, float], None] | None = None,
) -> None:
    """Train the model on the target's distribution at the target's own tokens.

    `report` receives the update, the loss, and the top-1 agreement with the target.
    """
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    parts = [p.requires_grad_(True) for p in trained_parts(model)]
    optimizer = torch.optim.AdamW(parts, lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates + 1, pct_start=0.1)
    batch = batches(texts, batch_size, longest, seed)
    for update in range(updates):
        tokens, written = batch(update)
        if not written[:, 1:].any():  # the prompts fill all truncated texts
            continue
        tokens, written = tokens.to(target.device), written.to(target.device)
        with torch.autocast(target.device.type, torch.bfloat16):
            loss, same = compare(model, target, tokens, written)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parts, 1.0)
        optimizer.step()
        schedule.step()
        if report is not None:
            report(update + 1, float(loss.detach()), float(same))
    model.eval()


def compare(model: Any, target: Target, tokens: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy with the target's distribution and the top-1 agreement, at the target's own tokens."""
    seen = (torch.arange(tokens.shape[1], device=tokens.device) < written.cumsum(1).argmax(1)[:, None] + 1).long()
    at = written[:, 1:]  # a position predicts the token after it
    inputs = {"input_ids": tokens[:, :-1], "attention_mask": seen[:, :-1], "use_cache": False}
    with torch.no_grad():
        wanted = target.model.get_output_embeddings()(target.model.base_model(**inputs).last_hidden_state[at]).float()
        chances = wanted.softmax(-1)
    logits = model.get_output_embeddings()(model.base_model(**inputs).last_hidden_state[at]).float()  # (n, V)
    loss = F.cross_entropy(logits, chances)
    return loss, (logits.argmax(-1) == wanted.argmax(-1)).float().mean()
