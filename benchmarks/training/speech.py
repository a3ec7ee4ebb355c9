"""Drafters for speech, distilled on the target's own transcripts.

A drafter is a small decoder, as in Distil-Whisper, or a recurrent drafter on the decoder's last hidden state.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from redrafter.drafters import RecurrentConfig, RecurrentDrafter, RecurrentNet
from redrafter.drafters.speech import shares_encoder, trained_parts
from redrafter.drafters.training import TrainingBatch
from redrafter.engine.speech import Transcriber
from redrafter.errors import ConfigError
from redrafter.targets.speech import SpeechTarget
from redrafter.texts import Texts
from redrafter.train.batches import make_batch
from redrafter.train.objective import Objective, States

CHOICES = 16
"""Number of the target's most probable tokens that are learned at each position."""


@dataclass(frozen=True)
class SpeechExample:
    """One window of sound: its encoder states, the target's transcript, and the target's probabilities."""

    sound: Tensor  # (F, C) fp16
    tokens: Tensor  # (n,) start tokens and text
    likely: Tensor  # (n, K) token ids
    weights: Tensor  # (n, K) their probabilities; zero where the next token is a start token


@torch.no_grad()
def speech_examples(
    transcriber: Transcriber, windows: Sequence[Tensor], batch_size: int = 8
) -> Iterator[SpeechExample]:
    """Let the target transcribe windows of sound, then compute its probabilities along each transcript.

    Transcripts without an end token are skipped: they are loops.
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
            yield SpeechExample(sound.half().cpu(), inputs.cpu(), likely.cpu(), weights.float().cpu())


def distill(
    draft: SpeechTarget,
    target: SpeechTarget,
    data: Sequence[SpeechExample],
    *,
    updates: int = 300,
    batch_size: int = 4,
    lr: float = 3e-4,
    seed: int = 0,
    bf16: bool = False,
    report: Callable[[int, float], None] | None = None,
) -> None:
    """Train the draft model's own layers on the target's probabilities of the tokens in the draft vocabulary.

    `bf16`: compute in bf16, which is faster on CPUs with bf16 instructions.
    """
    if not shares_encoder(draft, target):
        raise ConfigError("only a draft model that shares the target's encoder can be distilled")
    if not data:
        raise ConfigError("no training data: no window of sound was given")
    parts = trained_parts(draft)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    for update in range(updates):
        chosen = torch.randint(len(data), (batch_size,), generator=order).tolist()
        # One context per update: autocast caches the rounded weights until the context ends.
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
    data: Sequence[SpeechExample],
    *,
    guessable: int = 8192,
    depth: int = 4,
    updates: int = 400,
    batch_size: int = 4,
    lr: float = 1e-3,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> RecurrentDrafter:
    """Train a recurrent drafter on the decoder's last hidden state, as `redrafter train` does for text.

    Its draft vocabulary is the first `guessable` tokens, as in `drafters.speech`, and the end token.
    """
    data = [x for x in data if len(x.tokens) > len(target.opening)]  # at least one token after the start tokens
    if not data:
        raise ConfigError("no training data: no window of sound with words was given")
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
    net.token_ids[-1:].clamp_(min=target.config.eos_token_id)  # the end token is in the draft vocabulary too
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
def _batch(target: SpeechTarget, some: Sequence[SpeechExample]) -> tuple[TrainingBatch, States]:
    """Return the texts with their end tokens, and the hidden states along them."""
    rows = [[*x.tokens.tolist(), int(x.likely[-1, 0])] for x in some]
    count = len(rows)
    texts = Texts.of(rows, [len(target.opening)] * count, [0.0] * count, [0] * count)
    batch = make_batch(texts, range(count)).to(target.device)
    sound = torch.stack([x.sound.to(target.device, target.dtype) for x in some])
    states = target.model.model.decoder(input_ids=batch.tokens, encoder_hidden_states=sound).last_hidden_state
    return batch, States(states, states)


def loss(draft: SpeechTarget, batch: Sequence[SpeechExample]) -> Tensor:
    """Return the cross entropy with the target's distribution over all positions of a batch."""

    def padded(of: Callable[[SpeechExample], Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([of(x) for x in batch], batch_first=True).to(draft.device)

    sound = torch.stack([x.sound.to(draft.device, draft.dtype) for x in batch])
    states = draft.model.model.decoder(input_ids=padded(lambda x: x.tokens), encoder_hidden_states=sound)
    logp = F.log_softmax(draft.output_embedding(states.last_hidden_state).float(), -1)
    likely, weights = padded(lambda x: x.likely), padded(lambda x: x.weights)
    weights = torch.where(likely < draft.vocab_size, weights, 0.0)
    return -(logp.gather(2, likely.clamp(max=draft.vocab_size - 1)) * weights).sum() / weights.sum()
