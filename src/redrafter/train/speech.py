"""Drafters for speech, distilled on what the target itself writes down: a draft model (as Distil-Whisper is one), or a
recurrent drafter on the decoder's hidden state.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redrafter.config import RecurrentConfig
from redrafter.drafters import RecurrentDrafter
from redrafter.drafters.speech import own_parts, shares_ears
from redrafter.engine.speech import Transcriber
from redrafter.errors import ConfigError
from redrafter.nets.recurrent import RecurrentNet
from redrafter.targets.speech import SpeechTarget
from redrafter.train.batches import Batch, make_batch
from redrafter.train.dataset import Texts
from redrafter.train.objective import Objective, States

CHOICES = 16
"""How many of the target's most probable tokens are learned at each position."""


@dataclass(frozen=True)
class Lesson:
    """One window: what the encoder made of it, what the target wrote, and what else it might have written."""

    sound: Tensor  # (F, C) fp16
    tokens: Tensor  # (n,) opening and text
    likely: Tensor  # (n, K) token ids
    weights: Tensor  # (n, K) their probabilities; zero where the next token belongs to the opening


@torch.no_grad()
def lessons(transcriber: Transcriber, windows: Sequence[Tensor], batch_size: int = 8) -> Iterator[Lesson]:
    """Let the target transcribe windows of sound, then read its own text once more for the probabilities.

    A text without an end is a loop, which is nothing to learn from.
    """
    target = transcriber.target
    opening = torch.tensor(target.opening)
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        features = transcriber.features(batch)
        sounds = target.encode_audio(features)
        for sound, (_, written, _) in zip(sounds, transcriber.write(features, sounds), strict=True):
            if written[-1] not in transcriber.eos:
                continue
            tokens = torch.cat([opening, torch.tensor(written)])[: target.max_positions]
            inputs = tokens[:-1].to(target.device)
            states = target.model.model.decoder(input_ids=inputs[None], encoder_hidden_states=sound[None])
            chances = target.output_embedding(states.last_hidden_state[0]).softmax(-1)
            weights, likely = chances.topk(min(CHOICES, target.vocab_size))
            weights[: len(opening) - 1] = 0
            yield Lesson(sound.half().cpu(), inputs.cpu(), likely.cpu(), weights.float().cpu())


def distill(
    draft: SpeechTarget,
    target: SpeechTarget,
    data: Sequence[Lesson],
    *,
    updates: int = 300,
    batch_size: int = 4,
    lr: float = 3e-4,
    seed: int = 0,
    bf16: bool = False,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Teach the draft model's own layers the target's choices among the tokens it can guess.

    `bf16`: products in bf16, many times as fast where the machine has instructions for them.
    """
    if not shares_ears(draft, target):
        raise ConfigError("only a draft model that shares the target's encoder can be distilled here")
    if not data:
        raise ConfigError("there is nothing to learn from: no window of sound was given")
    parts = own_parts(draft)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    for update in range(updates):
        chosen = torch.randint(len(data), (batch_size,), generator=order).tolist()
        # A context for each update: it keeps its rounded copies of the weights until it ends.
        with torch.autocast(draft.device.type, torch.bfloat16, enabled=bf16):
            value = loss(draft, [data[i] for i in chosen])
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if report is not None:
            report(update + 1, float(value.detach()))


def distill_recurrent(
    target: SpeechTarget,
    data: Sequence[Lesson],
    *,
    guessable: int = 8192,
    depth: int = 4,
    updates: int = 400,
    batch_size: int = 4,
    lr: float = 1e-3,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> RecurrentDrafter:
    """A recurrent drafter on the decoder's last hidden state: what `redrafter train` makes for text, for speech.

    It guesses among the first `guessable` tokens, as a draft model of `drafters.speech` does, and the end of the text.
    """
    data = [x for x in data if len(x.tokens) > len(target.opening)]  # where something follows the first token
    if not data:
        raise ConfigError("there is nothing to learn from: no window of sound with some words was given")
    width, guessable = target.hidden_size, min(guessable, target.vocab_size)
    torch.manual_seed(seed)
    net = RecurrentNet(
        RecurrentConfig(
            vocab_size=target.vocab_size,
            context_size=width,
            embedding_size=width,
            state_size=width,
            exit_size=width,
            cell="gated",
            first_state="context",
            head="tied",
            draft_vocab_size=guessable,
            normed=True,
        )
    ).to(target.device)
    assert net.token_ids is not None
    net.token_ids[-1:].clamp_(min=target.config.eos_token_id)  # the end is a common token too
    objective = Objective(net, target, depth=depth, loss="soft", decay=0.8, chunk=None, bf16=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    for update in range(updates):
        some = [data[i] for i in torch.randint(len(data), (batch_size,), generator=order).tolist()]
        value, score = objective(*_batch(target, some))
        optimizer.zero_grad(set_to_none=True)
        value.div(score.count.sum()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if report is not None:
            report(update + 1, float(score.loss / score.count.sum()))
    return RecurrentDrafter(net, target)


@torch.no_grad()
def _batch(target: SpeechTarget, some: Sequence[Lesson]) -> tuple[Batch, States]:
    """The texts, their ends included, and the hidden states that wrote them."""
    rows = [[*x.tokens.tolist(), int(x.likely[-1, 0])] for x in some]
    count = len(rows)
    texts = Texts.of(rows, [len(target.opening)] * count, [0.0] * count, [0] * count)
    batch = make_batch(texts, range(count)).to(target.device)
    sound = torch.stack([x.sound.to(target.device, target.dtype) for x in some])
    states = target.model.model.decoder(input_ids=batch.tokens, encoder_hidden_states=sound).last_hidden_state
    return batch, States(states, states)


def loss(draft: SpeechTarget, batch: Sequence[Lesson]) -> Tensor:
    """Cross entropy with the target's distribution, over all positions of a batch."""

    def padded(of: Callable[[Lesson], Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([of(x) for x in batch], batch_first=True).to(draft.device)

    sound = torch.stack([x.sound.to(draft.device, draft.dtype) for x in batch])
    states = draft.model.model.decoder(input_ids=padded(lambda x: x.tokens), encoder_hidden_states=sound)
    logp = F.log_softmax(draft.output_embedding(states.last_hidden_state).float(), -1)
    likely, weights = padded(lambda x: x.likely), padded(lambda x: x.weights)
    weights = torch.where(likely < draft.vocab_size, weights, 0.0)
    return -(logp.gather(2, likely.clamp(max=draft.vocab_size - 1)) * weights).sum() / weights.sum()
