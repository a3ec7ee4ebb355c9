"""Tasks of `redrafter bench sampling`: summaries of articles and transcripts of speech, with human references."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redrafter.bench import paper_kernels
from redrafter.bench.quality import rouge1, word_error_rate
from redrafter.config import Gamma, SamplingParams, Shape
from redrafter.core.rules import RejectionRule
from redrafter.drafters import ModelDrafter
from redrafter.engine import Engine
from redrafter.engine.resolve import resolve_drafter
from redrafter.engine.speech import Transcriber, load_speech
from redrafter.errors import ConfigError
from redrafter.interop import wav
from redrafter.targets import load_target
from redrafter.targets.speech import SpeechTarget

MakeRule = Callable[[Shape, int], RejectionRule]


@dataclass(frozen=True)
class Article:
    text: str
    summary: str


def read_articles(path: Path) -> list[Article]:
    """Read articles: JSON lines in the Spec-Bench format, with a `reference`."""
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [Article(entry["turns"][0], entry["reference"][0]) for entry in entries]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path} contains no articles: expected lines with 'turns' and 'reference' ({error!r})"
        ) from error


class Summaries:
    """Summaries of articles, scored by ROUGE-1 against the reference."""

    metric, scale = "rouge1", paper_kernels.TEXT

    def __init__(self, data: Path, drafter: str, *, tokens: int, temperature: float, batch: int, **where: Any) -> None:
        self.articles = read_articles(data)
        self.tokens, self.temperature, self.batch = tokens, temperature, batch
        self.target = load_target(where.pop("model", None), **where)
        self.drafter = resolve_drafter(drafter, self.target)

    def __len__(self) -> int:
        return len(self.articles) // self.batch

    def write(self, index: int, rule: MakeRule, shape: Shape, gamma: Gamma, seed: int) -> str:
        """Write `batch` summaries as one batch; the result joins them with NUL characters."""
        drafter = self.drafter
        if isinstance(drafter, ModelDrafter):
            drafter = ModelDrafter(drafter.model, self.target, gamma=gamma)
        elif gamma.name != "constant":  # only a ModelDrafter has a gamma
            shape = Shape(width=1, length=gamma.first)
        engine = Engine(self.target, drafter, shape=shape, runtime="eager")
        engine.make_rule = lambda shape: rule(shape, self.target.vocab_size)
        some = self.articles[index * self.batch : (index + 1) * self.batch]
        prompts = [[{"role": "user", "content": a.text}] for a in some]
        done = engine.generate(
            prompts, batch_size=self.batch, max_new_tokens=self.tokens, temperature=self.temperature, seed=seed
        )
        return "\0".join(c.text for c in done)

    def score(self, texts: Sequence[tuple[int, str]]) -> float:
        found = []
        for index, text in texts:
            some = self.articles[index * self.batch : (index + 1) * self.batch]
            found += [rouge1(a.summary, one) for a, one in zip(some, text.split("\0"), strict=True)]
        return statistics.fmean(found)


class Speech:
    """Transcripts of clips, scored by word error rate. Clips are decoded one by one."""

    metric, scale = "wer", paper_kernels.SPEECH

    def __init__(self, data: Path, drafter: str, *, temperature: float, **where: Any) -> None:
        try:
            lines = (data / "transcripts.tsv").read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"{data} contains no clips: transcripts.tsv is missing") from error
        self.transcripts = dict(line.split("\t") for line in lines)
        loaded = load_speech(where.pop("model", None), drafter, **where)
        if not isinstance(loaded.drafter, SpeechTarget):
            raise ConfigError(
                f"speech needs a speech drafter or a smaller Whisper as drafter, got {drafter!r}; "
                "benchmarks/speech_drafter.py makes one"
            )
        self.target, self.drafter, self.temperature = loaded.target, loaded.drafter, temperature
        self.features = [loaded.features([wav.read(data / name)]) for name in self.transcripts]
        self.encoded = [self.target.encode_audio(one) for one in self.features]

    def __len__(self) -> int:
        return len(self.transcripts)

    def write(self, index: int, rule: MakeRule, shape: Shape, gamma: Gamma, seed: int) -> str:
        writer = Transcriber(self.target, self.drafter, shape=shape, gamma=gamma)
        writer.rule = rule(shape, self.target.vocab_size)
        sampling = SamplingParams(temperature=self.temperature)
        return writer.write(self.features[index], self.encoded[index], sampling, seed)[0][0]

    def score(self, texts: Sequence[tuple[int, str]]) -> float:
        transcripts = list(self.transcripts.values())
        return word_error_rate([transcripts[index] for index, _ in texts], [text for _, text in texts])
