"""Trains a drafter for a frozen target: updates, checkpoints, simulations, early stopping."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from redrafter.bounds import Seconds, checked
from redrafter.config import Shape
from redrafter.drafters import checkpoint
from redrafter.drafters.base import DrafterNet
from redrafter.drafters.options import DrafterOptions
from redrafter.drafters.training import TrainingBatch
from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.texts import Texts
from redrafter.train.batches import all_groups, count_positions, make_batch, micro_batches, sum_positions
from redrafter.train.config import TrainConfig
from redrafter.train.held_out import Evaluator
from redrafter.train.hidden_states import open_states
from redrafter.train.journal import Journal, Record, Watcher
from redrafter.train.lock import only_writer
from redrafter.train.objective import Score, States, add_scores, make_objective
from redrafter.train.run import Run, TrainingFailed, disk_errors
from redrafter.train.schedule import LEAST_POSITIONS, Plan, Speed, TooSlow, learning_rate, measure_evaluation
from redrafter.train.setup import check, make_net, settings, split, spread
from redrafter.train.teacher import Teacher
from redrafter.train.text_plan import grow

SHOW_EVERY, SHOW_SECONDS = 20, 5.0
"""Updates between two looks at the loss, fewer if they take longer: each look waits for the GPU."""

WRITTEN = 4
"""What is written at the end, in networks: the drafter, and a checkpoint with AdamW's two moments."""

CHECKED = 64
"""Tokens on which the head alone must give the target's logits."""


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    updates: int
    tokens_per_step: float
    seconds: float
    parameters: int
    records: list[Record]


@checked
def train(
    target: Target,
    texts: Texts,
    folder: Path,
    *,
    options: DrafterOptions | None = None,
    config: TrainConfig | None = None,
    shape: Shape | None = None,
    init_from: Path | None = None,
    watcher: Watcher | None = None,
    seconds: Seconds | None = None,
) -> Trained:
    """Train into `folder`, or go on with what lies there; its config.json and model.safetensors are the best drafter.

    shape: the beam and node budget that tokens/step is simulated with. seconds: what is left of `config.minutes`.
    """
    began = time.perf_counter()
    if not texts.within(target.vocab_size):
        raise ConfigError(f"the texts have token ids outside the vocabulary of {target.vocab_size} of {target.name}")
    config = config or TrainConfig()
    run = Run(folder)
    shape = shape or Shape(width=16, length=config.depth, nodes=63)
    accelerator = Accelerator(cpu=target.device.type == "cpu")
    if config.minutes is not None and accelerator.num_processes > 1:
        raise ConfigError("minutes are for one process, because several would not stop at the same update: set updates")
    options = options or DrafterOptions()
    rollouts = 0 if texts.rollouts is None else texts.rollouts.shape[1]
    planned = check(target, options, config, shape, init_from, rollouts)
    held, learn = split(texts, config.held_out)
    if len(learn) < accelerator.num_processes:
        raise ConfigError(f"{len(learn)} texts cannot keep {accelerator.num_processes} processes busy")
    net = make_net(target, texts.select(learn), options, config.seed, init_from)
    if config.loss != "hard":
        Teacher(target, None).check(texts.row(int(held[0])).long()[None, :CHECKED].to(target.device))
    whole = settings(target, planned, config, shape, init_from, accelerator.num_processes)
    whole |= {"texts": len(texts), "tokens": len(texts.tokens)}
    run.check(whole)
    with contextlib.ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(only_writer(folder))
        training = _Training(target, texts, run, net, config, shape, accelerator, held, learn, watcher)
        if training.journal is not None:
            stack.callback(training.journal.close)
            run.begin(whole)
        accelerator.wait_for_everyone()
        if config.minutes is not None:
            left = 60 * config.minutes if seconds is None else seconds
            training.keep_to_time(left, began)
        return training.finish()


class _Training:
    def __init__(
        self,
        target: Target,
        texts: Texts,
        run: Run,
        net: DrafterNet,
        config: TrainConfig,
        shape: Shape,
        accelerator: Accelerator,
        held: Tensor,
        learn: Tensor,
        watcher: Watcher | None,
    ) -> None:
        self.target, self.texts, self.run, self.config, self.shape = target, texts, run, config, shape
        self.accelerator, self.watcher = accelerator, watcher
        self.held, self.learn = held, learn
        self.net = net.to(target.device)
        found = run.load()
        if found is not None:  # before the objective is made: the run's token ids may be in another order
            self.net.load_state_dict({k[4:]: v for k, v in found[0].items() if k.startswith("net.")})
        objective = make_objective(self.net, target, config)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.objective = accelerator.prepare_model(objective) if accelerator.num_processes > 1 else objective
        hurries, layers = config.minutes is not None, self.net.config.layers
        self.source = open_states(config.states, target, layers, texts, run.folder / "states", hurries)
        self.evaluator = Evaluator(self.net, objective, target, texts, learn, shape, self.source)
        self.micro = config.micro_batch or config.positions
        self.ahead: tuple[dict[int, int], States] | None = None
        self.update, self.seconds, self.longest = 0, 0.0, 0.0
        self.best, self.best_update = 0.0, 0
        self.plan: Plan | None = None
        if found is not None:
            self._resume(*found)
        self.journal = Journal(run.folder, after=self.update) if accelerator.is_main_process else None
        self.window: list[Score] = []
        self.steepest = torch.zeros((), device=target.device)  # largest gradient since the last look; nan stays

    def keep_to_time(self, seconds: float, began: float) -> None:
        """Measure what fits into these seconds, of which some are over since `began`; a resumed run has its plan."""
        config, net = self.config, {k: v.clone() for k, v in self.net.state_dict().items()}
        if self.plan is None:
            counts = count_positions(self.texts, self.learn)
            most = min(int(counts.sum()) // config.together + 1, config.positions)
            enough = seconds / 100
            position = grow(lambda size: self._time_gradient(size, counts, enough), LEAST_POSITIONS, most, enough)
            timed = functools.partial(self._time_evaluation, most=10 * enough)
            texts, evaluation = measure_evaluation(timed, len(self.held), 2 * enough)
            self.net.load_state_dict(net)  # an evaluation may calibrate it
            speed = Speed(position, texts, evaluation)
            ending = WRITTEN * self.run.time_writing(net)
            left = seconds - (time.perf_counter() - began) - ending
            self.plan = Plan.of(config, speed, left, len(self.held), most)
            self._note(str(self.plan))
        self.config = self.plan.apply(config)
        self.held = spread(self.held, self.plan.held_out)
        if self.watcher is not None:
            self.watcher.planned(self.plan.updates)

    def _time_gradient(self, positions: int, counts: Tensor, enough: float) -> float:
        """Seconds for each position of an update of about so many; twice, for some things are made once."""
        rows = self.learn[: int((counts.cumsum(0) < positions).sum()) + 1].tolist()
        for _ in range(2):
            began = time.perf_counter()
            score = self._gradient(rows, positions, is_last=True)
            float(score.loss)  # waits for the GPU
            took = time.perf_counter() - began
            self.optimizer.zero_grad(set_to_none=True)
            if took >= enough:
                break
        return took / sum_positions(self.texts, rows)

    def _time_evaluation(self, texts: int, most: float) -> float:
        began = time.perf_counter()

        def pause() -> None:
            if time.perf_counter() - began > most:
                raise TooSlow

        self.evaluator(spread(self.held, texts), self.micro, pause)
        return time.perf_counter() - began

    def finish(self) -> Trained:
        config = self.config
        began, before = time.perf_counter(), self.seconds
        shown, shown_at = self.update, began
        stale = (self.update - self.best_update) // config.evaluation_interval
        order = self._order()
        while not self._over() and not (config.patience and stale >= config.patience):
            update_began = time.perf_counter()
            self._one_update(*next(order))
            self.update += 1
            now = time.perf_counter()
            self.seconds, self.longest = before + now - began, max(self.longest, now - update_began)
            saves = self.update % config.checkpoint_every == 0 or self._over()
            evaluates = self.update % config.evaluation_interval == 0 or self._over()
            waited = time.perf_counter() - shown_at
            if self.update - shown >= SHOW_EVERY or waited >= SHOW_SECONDS or saves or evaluates:
                self._show(waited)
                shown, shown_at = self.update, time.perf_counter()
            if evaluates:
                self._evaluate()
                stale = (self.update - self.best_update) // config.evaluation_interval if len(self.held) else 0
                shown_at = time.perf_counter()
                self.seconds = before + shown_at - began
            if saves or self._over():
                self._save()
        if self.update % config.checkpoint_every and not self._over():
            self._save()  # stopped early: so that the same command finds nothing left to do
        records = self.journal.records if self.journal is not None else []
        parameters = sum(p.numel() for p in self.net.parameters())
        return Trained(self.update, self.best, self.seconds, parameters, records)

    def _over(self) -> bool:
        """In limited time an update that would end too late, if it takes as long as the longest, is not begun."""
        if self.config.minutes is None:
            return self.update >= self.config.updates
        return self.seconds + self.longest >= 60 * self.config.minutes

    def _order(self) -> Iterator[tuple[list[int], int]]:
        """This process's rows of each update to come, and the positions of all processes' rows."""
        config, world, me = self.config, self.accelerator.num_processes, self.accelerator.process_index
        groups = all_groups(
            self.texts, self.learn, config.positions * world, config.together, config.seed, self.update, world
        )
        for group, skip in groups:
            self._look_ahead([row for rows in group for row in rows[me::world]])
            for rows in group[skip:]:
                yield rows[me::world], sum_positions(self.texts, rows)

    def _look_ahead(self, rows: list[int]) -> None:
        """Hidden states of a group of updates in one pass, while memory allows."""
        self.ahead = None
        if self.micro < self.config.positions or self.texts.rollouts is not None:
            return
        with contextlib.suppress(torch.OutOfMemoryError):
            batch = make_batch(self.texts, rows).to(self.target.device)
            self.ahead = ({row: place for place, row in enumerate(rows)}, self.source.fetch(batch, rows))

    def _states(self, batch: TrainingBatch, rows: list[int]) -> States:
        if self.ahead is None:
            return self.source.fetch(batch, rows)
        places, states = self.ahead
        where = torch.tensor([places[row] for row in rows], device=batch.tokens.device)
        return states.rows(where, batch.tokens.shape[1])

    def _one_update(self, rows: list[int], total: int) -> None:
        """Gradients of all rows, in micro-batches that fit; then one step of the optimiser."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.update, self.seconds)
        if self.config.loss == "seeded":  # the same noise after a restart
            torch.manual_seed(self.config.seed * 1_000_003 + self.update)
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            scores: list[Score] = []
            parts = micro_batches(self.texts, rows, self.micro)
            try:
                for i, part in enumerate(parts):
                    scores.append(self._gradient(part, total, is_last=i == len(parts) - 1))
                break
            except torch.OutOfMemoryError:
                if self.accelerator.num_processes > 1:  # the others cannot know that this one must begin again
                    raise TrainingFailed("out of memory on one of several GPUs: give a smaller --micro-batch") from None
                if self.source.free_memory():
                    self._note("out of memory: hidden states are no longer kept")
                elif self.micro <= 1 or max(len(p) for p in parts) == 1:
                    raise TrainingFailed(
                        "out of memory even with one text at a time: give a smaller --chunk, --depth or drafter, or "
                        "shorter texts"
                    ) from None
                else:
                    self.micro = max(1, min(self.micro, sum_positions(self.texts, rows)) // 2)
                    self._note(f"out of memory: going on with {self.micro} positions at once")
                self.ahead = None
                scores.clear()
                torch.cuda.empty_cache()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.config.clip)
        self.steepest = torch.maximum(self.steepest, norm)
        self.optimizer.step()
        self.window += scores

    def _gradient(self, rows: list[int], total: int, is_last: bool) -> Score:
        batch = make_batch(self.texts, rows).to(self.target.device)
        states = self._states(batch, rows)
        world = self.accelerator.num_processes
        together = contextlib.nullcontext() if world == 1 or is_last else self.accelerator.no_sync(self.objective)
        with together:
            loss, score = self.objective(batch, states)
            (loss * (world / total)).backward()  # processes average, the loss is a sum
        assert isinstance(score, Score)
        return score

    def _show(self, seconds: float) -> None:
        """Look at what was summed up; a loss that is no number ends the run before it can be saved."""
        score = add_scores(self.window)
        self.window = []
        loss, right, count = float(score.loss), score.right.tolist(), score.count.tolist()
        steepest = float(self.steepest)
        self.steepest.zero_()
        if not (math.isfinite(loss) and math.isfinite(steepest)):
            raise TrainingFailed(
                f"the loss is not a number at update {self.update}, the last checkpoint is intact: try again in "
                f"another folder with a smaller --lr than {self.config.lr:g}"
            )
        self._record(
            {
                "update": self.update,
                "loss": loss / max(1, count[0]),
                "accuracy": [r / max(1, n) for r, n in zip(right, count, strict=True)],
                "lr": learning_rate(self.config, self.update - 1, self.seconds),
                "positions_per_second": self.accelerator.num_processes * count[0] / max(seconds, 1e-9),
                "seconds": self.seconds,
            }
        )

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Simulate; the best drafter so far becomes the one in the folder. Other processes wait."""
        if not len(self.held):  # no time for it
            self._write()
            return
        figure = torch.zeros(2, dtype=torch.float64, device=self.target.device)
        if self.accelerator.is_main_process:
            walked, score = self.evaluator(self.held, self.micro)
            count = score.count.tolist()
            held = {
                "tokens_per_step": walked.tokens_per_step,
                "accuracy": [r / max(1, n) for r, n in zip(score.right.tolist(), count, strict=True)],
                "loss": float(score.loss) / max(1, count[0]),
            }
            self._record({"update": self.update, "seconds": self.seconds, "held_out": held})
            if walked.tokens_per_step > self.best:
                self.best, self.best_update = walked.tokens_per_step, self.update
                self._write()
            figure = torch.tensor([self.best, self.best_update], dtype=torch.float64, device=self.target.device)
        if self.accelerator.num_processes > 1:
            torch.distributed.broadcast(figure, 0)
            self.best, self.best_update = float(figure[0]), int(figure[1])

    def _write(self) -> None:
        with disk_errors(self.run.folder):
            checkpoint.write(self.run.folder, self.net, self.target, overwrite=True)

    def _record(self, record: Record) -> None:
        if self.journal is not None:
            with disk_errors(self.run.folder):
                self.journal.write(record)
        if self.watcher is not None and self.accelerator.is_main_process:
            (self.watcher.held_out if "held_out" in record else self.watcher.training)(record)

    def _note(self, text: str) -> None:
        if self.watcher is not None:
            self.watcher.note(text)

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        tensors = {f"net.{k}": v for k, v in self.net.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{k}": v for k, v in state.items()}
        names = ("seconds", "longest", "best", "best_update")
        facts: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.plan is not None:
            facts["plan"] = self.plan.facts
        self.run.save(self.update, tensors, facts)

    def _resume(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".")
                state.setdefault(int(index), {})[name] = value
        whole: dict[str, Any] = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state, "param_groups": whole["param_groups"]})
        self.update, self.seconds, self.longest = facts["update"], facts["seconds"], facts.get("longest", 0.0)
        self.best, self.best_update = facts["best"], facts["best_update"]
        if "plan" in facts:
            self.plan = Plan(**facts["plan"])
