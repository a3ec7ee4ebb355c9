"""Writes many texts at once, plainly: rows that end are replaced by new prompts, a GPU replays one graph.

Meant for making training data, where only the total matters: the batch is large, nothing is guessed, and
the host looks at what was written only every few steps. Each text is the one `Engine.plain()` writes with
the same seed.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redrafter.core.cache import KVCache
from redrafter.core.noise import SEEDED, as_int64, gumbel
from redrafter.core.tree import root_tree
from redrafter.runtime.eager import Start
from redrafter.targets import Target
from redrafter.targets.cuda.grouped_attention import use_grouped_attention

log = logging.getLogger(__name__)

ROUND = 16
"""Steps between two looks of the host."""
EXTENT = 64
"""Attention reads a multiple of this many slots, so that few graphs serve all lengths."""
PREFILL_ROWS, PREFILL_TOKENS = 128, 8192
"""Prompts read at once, and their tokens: bounds the memory of their logits and what padding costs."""


def write_texts(
    target: Target,
    starts: Sequence[Start],
    temperatures: Sequence[float],
    *,
    rows: int,
    progress: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """New tokens of every start, its ending token included; `rows` of them are written at once, fewer if need be."""
    if not starts:
        return []
    rows = min(rows, len(starts))
    while True:
        try:
            return _write(target, starts, temperatures, rows, progress)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2  # outside the handler, so that nothing of the failed attempt is held on to
        torch.cuda.empty_cache()
        log.info("out of memory: writing %d texts at once", rows)


def _write(
    target: Target,
    starts: Sequence[Start],
    temperatures: Sequence[float],
    rows: int,
    progress: Callable[[int], None] | None,
) -> list[list[int]]:
    with use_grouped_attention(target), torch.no_grad():
        desk = _Desk(target, starts, temperatures, rows)
        while desk.open:
            told = desk.round()
            if progress is not None:
                progress(told)
    return desk.texts


class _Desk:
    """The batch: row r writes the text of start `holds[r]`, or nothing any more (-1)."""

    def __init__(self, target: Target, starts: Sequence[Start], temperatures: Sequence[float], rows: int) -> None:
        self.target, self.starts, self.temperatures = target, starts, temperatures
        self.texts: list[list[int]] = [[] for _ in starts]
        # Longest first: prompts read together are about equally long, and no long text is left for the end.
        self.waiting = sorted(range(len(starts)), key=lambda i: len(starts[i].prompt))
        self.holds = [-1] * rows
        self.most = max(s.budget for s in starts)
        longest = max(len(s.prompt) + s.budget for s in starts) + 1
        self.cache = KVCache(slots=-(-longest // EXTENT) * EXTENT)
        self.graphs = target.device.type == "cuda"
        self.replays: dict[int, torch.cuda.CUDAGraph] = {}
        device = target.device

        def column(fill: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        self.lengths, self.last, self.seeds = column(0), column(0), column(0)
        self.temperature = column(0, torch.float32)
        self.budget, self.written = column(0), column(0)
        self.done = column(1, torch.bool)
        self.eos = torch.full((rows, max([1, *(len(s.eos) for s in starts)])), -1, device=device)
        self.out = torch.zeros(rows, self.most + 1, dtype=torch.long, device=device)  # the last column is for nothing
        self.choose = torch.compile(choose) if device.type == "cuda" else choose

    @property
    def open(self) -> bool:
        return bool(self.waiting) or any(h >= 0 for h in self.holds)

    def round(self) -> int:
        """Fill empty rows, write for a while, take what is finished; how many tokens were taken."""
        free = [r for r, h in enumerate(self.holds) if h < 0]
        while free and self.waiting:
            longest = len(self.starts[self.waiting[-1]].prompt)
            count = max(1, min(PREFILL_ROWS, PREFILL_TOKENS // longest, len(self.waiting)))
            taken, free = free[:count], free[count:]
            self._begin(taken)
        if not self.waiting and self.target.device.type != "cuda":
            self._shrink()
        # A row that ends within the round stands still from then on, so no row outgrows its own budget.
        need = max(int(self.lengths.max()) + ROUND + 1, EXTENT)
        self.cache.extent = min(-(-need // EXTENT) * EXTENT, self.cache.slots)
        for _ in range(ROUND):
            self._advance()
        return self._harvest()

    def _begin(self, rows: list[int]) -> None:
        mine = [self.waiting.pop() for _ in rows]
        starts = [self.starts[i] for i in mine]
        lengths = [len(s.prompt) for s in starts]
        device = self.target.device
        tokens = torch.tensor([list(s.prompt) + [0] * (max(lengths) - len(s.prompt)) for s in starts], device=device)
        prompts = KVCache(slots=max(lengths))
        logits, _ = self.target.prefill(tokens, lengths, prompts, ())
        at = torch.tensor(rows, device=device)
        self.cache.place(prompts, at, len(self.holds))
        width = self.eos.shape[1]
        for row, start in zip(rows, mine, strict=True):
            self.holds[row] = start
        self.lengths[at] = torch.tensor(lengths, device=device)
        self.seeds[at] = torch.tensor([as_int64(s.seed) for s in starts], device=device)
        self.temperature[at] = torch.tensor([self.temperatures[i] for i in mine], device=device)
        self.budget[at] = torch.tensor([s.budget for s in starts], device=device)
        self.eos[at] = torch.tensor([list(s.eos) + [-1] * (width - len(s.eos)) for s in starts], device=device)
        first = choose(logits, self.temperature[at], self.seeds[at], self.lengths[at])
        self.last[at] = self.out[at, 0] = first
        self.written[at] = 1
        self.done[at] = (first[:, None] == self.eos[at]).any(1) | (self.budget[at] == 1)

    def _advance(self) -> None:
        """One step; on a GPU a replayed graph, recorded after one step in the ordinary way."""
        if not self.graphs:
            self._step()
            return
        extent = self.cache.extent
        if extent in self.replays:
            self.replays[extent].replay()
            return
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.replays.values())).pool() if self.replays else None
        try:
            with torch.cuda.graph(graph, pool=pool):
                self._step()
        except RuntimeError as error:
            self.graphs = False
            log.info("%s cannot be recorded as a graph, so writing is slower (%s)", self.target.name, error)
        else:
            self.replays[extent] = graph

    def _step(self) -> None:
        """Every live row gains a token. Static shapes, nothing read by the host."""
        logits, _ = self.target.verify(root_tree(self.last), self.lengths, self.cache, ())
        token = self.choose(logits[:, 0], self.temperature, self.seeds, self.lengths + 1)
        live = ~self.done
        where = torch.where(live, self.written, self.most)
        self.out.scatter_(1, where[:, None], token[:, None])
        self.last.copy_(torch.where(live, token, self.last))
        self.lengths.add_(live)
        self.written.add_(live)
        ended = (token[:, None] == self.eos).any(1) | (self.written >= self.budget)
        self.done.logical_or_(live & ended)

    def _harvest(self) -> int:
        done = self.done.tolist()
        finished = [r for r, h in enumerate(self.holds) if h >= 0 and done[r]]
        if not finished:
            return 0
        at = torch.tensor(finished, device=self.target.device)
        counts = self.written[at].tolist()
        told = 0
        for row, tokens, n in zip(finished, self.out[at].tolist(), counts, strict=True):
            self.texts[self.holds[row]] = tokens[:n]
            self.holds[row] = -1
            told += n
        return told

    def _shrink(self) -> None:
        """Drop empty rows once they are half: without a graph, fewer rows are quicker."""
        live = [r for r, h in enumerate(self.holds) if h >= 0]
        if not live or 2 * len(live) > len(self.holds):
            return
        at = torch.tensor(live, device=self.target.device)
        self.cache.keep(at)
        self.holds = [self.holds[r] for r in live]
        for name in ("lengths", "last", "seeds", "temperature", "budget", "written", "done", "eos", "out"):
            setattr(self, name, getattr(self, name)[at])


def choose(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """(B, V) logits of the tokens at `positions` (B,) -> (B,) the target's choice under the `seeded` rule."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    noise = gumbel(seeds, positions[:, None], logits.shape[1], stream=SEEDED, dtype=dtype)[:, 0]
    hot = (temperature > 0)[:, None]
    scores = logits.to(dtype) / torch.where(hot[:, 0], temperature, 1.0)[:, None]
    return (scores + torch.where(hot, noise, 0.0)).argmax(-1)
