"""Makes training data: prompts from a file or from the target itself, the target's answers, and its rollouts."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from redrafter.bounds import checked
from redrafter.config import SamplingParams
from redrafter.core.noise import as_int64, fold
from redrafter.drafters import NoDrafter
from redrafter.engine import Engine
from redrafter.errors import ConfigError
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.row import Request
from redrafter.targets import Target
from redrafter.targets.tokenizer import has_chat_template
from redrafter.texts import Texts
from redrafter.train.config import DistillConfig
from redrafter.train.data_folder import Begun, Distilled, Folder, check_disk, digest, settled
from redrafter.train.dataset import target_entry
from redrafter.train.local_rollouts import roll_out_rows
from redrafter.train.lock import only_writer
from redrafter.train.self_prompts import Piece, SelfPrompts, mark, messages
from redrafter.train.task_prompts import TaskPrompts
from redrafter.train.text_plan import Clock, OutOfTime

Progress = Callable[[int, int], None]
"""Told of (rows finished, tokens written), each since it was last told."""

PATIENCE = 500
"""Self-written prompts tried in one shard before asking whether any are of use."""
FEW = 3
"""Texts that a shard must have even when time runs out: training needs two, and one to evaluate."""
ROW_BYTES = 64
"""What a row costs on disk besides its tokens, generously."""
DOCUMENTS = 0.7
"""Temperature of documents: at 1 a small model soon writes nonsense."""
SHORT, LONG_TAKE = 384, 4
"""Prompts up to SHORT tokens are answered first; of longer ones, a LONG_TAKE-th as many at once."""


class Source(Protocol):
    """Where rows come from; piece i is the same whenever it is asked for."""

    @property
    def endless(self) -> bool:
        """Whether there is always another piece."""

    def take(self, first: int, count: int) -> list[Piece]:
        """Pieces first, first + 1, ..., fewer than `count` only at the end."""


class Listed:
    """Given prompts or texts, each once, in an order of the seed's."""

    endless = False

    def __init__(self, items: Sequence[str], seed: int, piece: Callable[[str], Piece]) -> None:
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(as_int64(seed))).tolist()
        self.items, self.piece = [items[i] for i in order], piece

    def take(self, first: int, count: int) -> list[Piece]:
        return [self.piece(item) for item in self.items[first : first + count]]


class Remembered:
    """Pieces of a source that were taken and not used are not written again."""

    def __init__(self, source: Source) -> None:
        self.source, self.endless = source, source.endless
        self.known: dict[int, Piece] = {}

    def take(self, first: int, count: int) -> list[Piece]:
        wanted = range(first, first + count)
        self.known = {i: piece for i, piece in self.known.items() if i >= first}
        missing = [i for i in wanted if i not in self.known]
        if missing:
            self.known |= zip(missing, self.source.take(missing[0], len(missing)), strict=False)
        return [self.known[i] for i in wanted if i in self.known]


@checked
def distill(
    target: Target,
    folder: Path,
    config: DistillConfig,
    *,
    prompts: Sequence[str] | None = None,
    self_prompt: bool = False,
    documents: Sequence[str] | None = None,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Distilled:
    """Fill a folder with texts, going on where an earlier run with the same settings was stopped.

    `prompts` are answered, each once; then, with `self_prompt`, the target writes the rest of the
    prompts itself. `documents` are texts that are taken as they are, for `config.local` rollouts. With a `clock`, a
    further shard is begun only if half of it fits into the time, judged by the slowest shard so far.
    """
    if documents is not None and (prompts is not None or self_prompt):
        raise ConfigError("give either whole texts or prompts to answer, not both")
    if documents is not None and not config.local:
        raise ConfigError("texts that the target did not write teach only through its rollouts: set local to 1 or more")
    if documents is None and prompts is None and not self_prompt:
        raise ConfigError("there is nothing to start from: give prompts or texts, or let the target write its own")
    with only_writer(folder):
        config = _settled(config, folder, target)
        assert config.shard is not None
        made = Folder(
            folder,
            target_entry(target),
            _settings(config) | {"prompts": digest(prompts), "self_prompt": self_prompt, "text": digest(documents)},
        )
        slowest = 0.0
        clock = clock or Clock()
        clock.start()
        writer = _Writer(target, config, progress, clock)
        sources = writer.sources(prompts, self_prompt, documents)
        total = config.texts if self_prompt else min(config.texts, len(prompts or documents or ()))
        if made.finished < total and clock.seconds == math.inf:
            check_disk(folder, total - made.finished, row_bytes(config))
        made.open()
        begun = Begun(0, [0] * len(sources), set())
        while begun.rows < total:
            now = time.perf_counter()
            if begun.rows and now - clock.began + slowest / 2 > clock.seconds:
                break
            index, wanted = begun.rows // config.shard, min(config.shard, total - begun.rows)
            rows = made.read(index, begun)
            if rows is None:
                try:
                    texts, marks, dropped = writer.shard(sources, begun, wanted)
                except OutOfTime:
                    if not begun.rows:
                        raise
                    break
                rows = made.add(index, texts, marks, begun.used, dropped)
            begun.rows += rows
            slowest = max(slowest, time.perf_counter() - now)
            if progress is not None:
                progress(rows, 0)
            if rows < wanted:  # the file ran out
                break
        return made.close()


def row_bytes(config: DistillConfig) -> int:
    """What a row may take on disk."""
    return 4 * (config.longest_prompt + config.max_new_tokens) * (1 + config.local) + ROW_BYTES


def usual_batch(target: Target) -> int:
    """Texts written at once if nobody says how many."""
    return 2048 if target.device.type == "cuda" else 16


def _settled(config: DistillConfig, folder: Path, target: Target) -> DistillConfig:
    """With what was left open: by the folder if it was begun before, else by the device."""
    gpu = target.device.type == "cuda"
    shard = config.shard or settled(folder, "shard") or (8192 if gpu else 256)
    return dataclasses.replace(config, shard=shard, batch=config.batch or usual_batch(target))


def _settings(config: DistillConfig) -> dict[str, Any]:
    """What decides the data. How many are written at once does not: a run out of memory goes on with fewer."""
    found = dataclasses.asdict(config) | {"temperatures": list(config.temperatures)}
    del found["batch"]
    return found


class _Writer:
    """Turns pieces into rows."""

    def __init__(
        self,
        target: Target,
        config: DistillConfig,
        progress: Progress | None,
        clock: Clock | None = None,
    ) -> None:
        self.target, self.config, self.clock = target, config, clock or Clock()
        self.check = self.clock.check
        self.engine = Engine(target, NoDrafter())
        self.eos = self.engine.eos_tokens()
        self.tell = (lambda n: progress(0, n)) if progress is not None else None
        assert config.batch is not None
        self.batch = config.batch

    def sources(
        self, prompts: Sequence[str] | None, self_prompt: bool, documents: Sequence[str] | None
    ) -> list[Source]:
        found: list[Source] = []
        if documents is not None:
            found.append(Listed(documents, self.config.seed, self._document))
        if prompts is not None:
            found.append(Listed(prompts, self.config.seed, self._prompt))
        if self_prompt:
            chats = has_chat_template(self.target)
            free = SelfPrompts(
                self.target,
                self._encode,
                seed=self.config.seed,
                budget=self.config.prompt_tokens if chats else self.config.max_new_tokens,
                rows=self.batch,
                progress=self.tell,
                check=self.check,
            )
            tasks = chats and self.config.tasks
            own: Source = TaskPrompts(free, self._answer, tasks, self.config.seed) if tasks else free
            found.append(Remembered(own))
        return found

    def _answer(self, chats: Sequence[tuple[str, ...]], seeds: Sequence[int], limit: int) -> list[str]:
        """The target's answers as text, for documents and conversations that prompts are made of."""
        if not chats:
            return []
        requests = [
            self._request(prompt, seed, limit, DOCUMENTS)
            for prompt, seed in zip(self._encode(chats), seeds, strict=True)
        ]
        new = write_texts(self.target, requests, rows=self.batch, progress=self.tell, check=self.check)
        found = self.target.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [str(text).strip() for text in found]

    def _tell_and_check(self, tokens: int) -> None:
        if self.tell is not None:
            self.tell(tokens)
        self.check()

    def _request(self, prompt: list[int], seed: int, limit: int, temperature: float) -> Request:
        room = max(1, min(limit, self.target.max_positions - len(prompt)))
        sampling = SamplingParams(temperature=temperature)
        return Request(prompt=prompt, seed=seed, max_new_tokens=room, sampling=sampling, eos=self.eos)

    def _encode(self, chats: Sequence[tuple[str, ...]]) -> list[list[int]]:
        """Prompts of chats whose turns are the user's and the model's in turn; all at once, which is quick.

        Without a chat template a prompt is the text of its only turn, as `Engine.encode` would encode it.
        """
        if not chats:
            return []
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{self.target.name} came without a tokenizer: prompts need one")
        whole = [turns[0] for turns in chats]
        if has_chat_template(self.target):
            said = [messages(turns) for turns in chats]
            whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        made = tokenizer(whole, add_special_tokens=not has_chat_template(self.target))["input_ids"]
        return [self._known(list(ids)) for ids in made]

    def _known(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self.target.vocab_size:
            raise ConfigError(
                f"the tokenizer of {self.target.name} knows token {max(ids)}, but its vocabulary has "
                f"{self.target.vocab_size}: give the tokenizer that belongs to it"
            )
        return ids

    def _prompt(self, text: str) -> Piece:
        return Piece(self._encode([(text,)])[0] if text.strip() else [], mark(text))

    def _document(self, text: str) -> Piece:
        most = min(self.config.longest_prompt + self.config.max_new_tokens, self.target.max_positions)
        return Piece(self._known(self.engine.encode(text))[:most], mark(text), seed=self.config.seed, temperature=0.0)

    def shard(self, sources: Sequence[Source], begun: Begun, wanted: int) -> tuple[Texts, list[int], dict[str, int]]:
        """The next `wanted` texts; their marks; what was dropped on the way, by reason.

        Pieces are taken in order until the shard is full, so how many are fetched at a time changes
        nothing. `begun` moves on, but for its rows.
        """
        pieces: list[Piece] = []
        dropped: Counter[str] = Counter()
        for place, source in enumerate(sources):
            tried, before = 0, len(pieces)
            while len(pieces) < wanted:
                asked_at = self.clock.passed if source.endless else 0.0
                fetched = source.take(begun.used[place], max(wanted - len(pieces), self.batch))
                if not fetched:
                    break
                for piece in fetched:
                    begun.used[place] += 1
                    tried += 1
                    if reason := self._reason(piece, begun.seen):
                        dropped[reason] += 1
                        continue
                    begun.seen.add(piece.mark)
                    pieces.append(piece)
                    if len(pieces) == wanted:
                        break
                kept = len(pieces) - before
                if source.endless and len(pieces) >= FEW:
                    passed = self.clock.passed
                    if passed + 2 * (passed - asked_at) > self.clock.seconds:  # no time for more prompts and answers
                        break
                if source.endless and len(pieces) < wanted and tried >= PATIENCE and 50 * kept < tried:
                    raise ConfigError(
                        f"{self.target.name} writes hardly any prompts of use ({kept} of {tried}; "
                        f"{_listing(dropped.items())}): give a file of prompts"
                    )
        return self._texts(pieces, begun.rows), [p.mark for p in pieces], dict(dropped)

    def _reason(self, piece: Piece, seen: set[int]) -> str | None:
        if piece.dropped is not None:
            return piece.dropped
        if not piece.tokens:
            return "empty"
        most = min(self.config.longest_prompt, self.target.max_positions - 1)
        if piece.seed is None and len(piece.tokens) > most:
            return "too long"
        return "duplicate" if piece.mark in seen else None

    def _texts(self, pieces: Sequence[Piece], first: int) -> Texts:
        config = self.config
        numbers = range(first, first + len(pieces))
        seeds = [fold(config.seed, i) if p.seed is None else p.seed for i, p in zip(numbers, pieces, strict=True)]
        cycle = config.temperatures
        temperatures = [cycle[i % len(cycle)] for i in numbers]
        open_ = [i for i, p in enumerate(pieces) if p.seed is None]
        answers: dict[int, list[int]] = {}
        for longest, fewer in ((SHORT, 1), (self.target.max_positions, LONG_TAKE)):  # room is made for the longest
            some = [i for i in open_ if i not in answers and len(pieces[i].tokens) <= longest]
            requests = [self._request(pieces[i].tokens, seeds[i], config.max_new_tokens, temperatures[i]) for i in some]
            at_once = max(1, self.batch // fewer)
            written = write_texts(self.target, requests, rows=at_once, progress=self.tell, check=self.check)
            answers |= dict(zip(some, written, strict=True))
        rows = [p.tokens for p in pieces]
        lengths = [1 if p.seed is not None else len(p.tokens) for p in pieces]
        for i, answer in answers.items():
            rows[i] = [*rows[i], *answer]
        return Texts.of(
            rows,
            lengths,
            [t if p.seed is None else p.temperature for t, p in zip(temperatures, pieces, strict=True)],
            seeds,
            roll_out_rows(self.target, rows, config.local, self._tell_and_check) if config.local and rows else None,
        )


def _listing(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{reason}: {n}" for reason, n in counts) or "nothing dropped"
