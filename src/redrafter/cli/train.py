"""`redrafter train`: trains a drafter for a model, with or without data of your own."""

import argparse
import dataclasses
import math
import os
import time
from typing import TYPE_CHECKING, Any

from redrafter.cli.console import Console
from redrafter.cli.distill import add_distill_options, distill_sources, make_texts
from redrafter.cli.fields import add_fields, add_value, from_fields
from redrafter.cli.live import LiveTraining
from redrafter.cli.options import add_target, of_packages
from redrafter.cli.paths import InputFolder, OutputFolder
from redrafter.cli.progress import waiting
from redrafter.config import Shape
from redrafter.drafters import registry
from redrafter.drafters.options import DrafterOptions
from redrafter.errors import ConfigError
from redrafter.train.config import DistillConfig, TrainConfig

if TYPE_CHECKING:
    from redrafter.drafters.base import DrafterConfig
    from redrafter.targets import Target
    from redrafter.train.trainer import Trained

EPILOG = """examples:
  redrafter train --out my-drafter --model my-model               needs no data: the model writes its own
  redrafter train --out my-drafter --model my-model --minutes 20  the same in about 20 minutes
  redrafter train --out my-drafter --model my-model --estimate    what that would take here
  redrafter train --out my-drafter --prompts questions.jsonl --self-prompt
  redrafter train --out my-drafter --data folder-of-redrafter-distill
  redrafter train --out tuned --model my-fine-tune --init-from my-drafter --updates 1000

Then: redrafter generate --model my-model --drafter my-drafter "..."
To resume a run that was stopped, give the same command again.
Several GPUs: torchrun --nproc_per_node 4 -m redrafter.cli.main train --data ... (made by redrafter distill)."""
REPORT_SECONDS = 1.0
"""Of --minutes: for the report and the end of the process."""


def add(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--out", OutputFolder, required=True, metavar="FOLDER", help="folder for the drafter")
    add_value(
        parser,
        "--data",
        InputFolder,
        metavar="FOLDER",
        help="data that `redrafter distill` made (default: make it now)",
    )
    add_value(
        parser,
        "--init-from",
        InputFolder,
        metavar="FOLDER",
        help="start from the weights and the shape of this drafter, ours or a published one (a larger --draft-vocab "
        "lets it guess more tokens)",
    )
    parser.add_argument(
        "--shape", default=None, metavar="WxL:N", help="shape for the simulated tokens/step (default: 16xDEPTH:63)"
    )
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="measure for a minute at most, say what time, disk and memory this run would take, and end",
    )
    group = parser.add_argument_group("drafter")
    kinds = [f"'{name}' ({entry.about})" for name, entry in registry.ENTRIES.items() if entry.kind is not None]
    help_ = ", ".join([*kinds, *of_packages()])
    add_value(group, "--drafter", str, default=DrafterOptions.drafter, help=f"{help_} (default recurrent)")
    add_fields(group, DrafterOptions, without=("drafter",))
    add_fields(parser.add_argument_group("training"), TrainConfig)
    add_distill_options(parser, without=("seed",))
    add_target(parser)


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()  # before torch is imported
    options, config = from_fields(args, DrafterOptions), from_fields(args, TrainConfig)
    shape = Shape.of(args.shape) if args.shape else Shape(width=16, length=config.depth, nodes=63)
    shaping = [f for f in dataclasses.fields(DrafterOptions) if f.name != "draft_vocab"]
    if args.init_from and any(getattr(args, f.name) != f.default for f in shaping):
        raise ConfigError("--init-from uses the shape of that drafter: leave the other drafter options out")
    for name in ("prompts", "text", "self_prompt", "local"):
        if args.data and getattr(args, name):
            raise ConfigError(f"--data names finished data: leave --{name.replace('_', '-')} out")
    plan = None if args.data else (from_fields(args, DistillConfig, seed=config.seed), distill_sources(args))
    # torchrun and accelerate launch set RANK: each process has its own GPU, and only the first one prints.
    rank = int(os.environ.get("RANK", 0))
    if plan is not None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("several processes need finished data: make it with redrafter distill and give --data")
    import torch

    from redrafter.targets import load_target
    from redrafter.train.dataset import read_texts
    from redrafter.train.journal import read_journal
    from redrafter.train.least import check_time
    from redrafter.train.report import write_report
    from redrafter.train.run import Run, disk_errors
    from redrafter.train.setup import check, settings
    from redrafter.train.text_plan import Clock, warm_up
    from redrafter.train.trainer import train

    device = args.device
    if device is None and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    console = Console(quiet=rank > 0)
    with waiting(console, "loading"):
        target = load_target(args.model, dtype=args.dtype, device=device)
        if config.minutes is not None:
            warm_up(target)

    def left() -> float:
        """Seconds until the report must begin."""
        return max(0.0, 60 * (config.minutes or math.inf) - REPORT_SECONDS - (time.perf_counter() - began))

    planned = check(target, options, config, shape, args.init_from, 0 if args.data else args.local)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    Run(args.out).check(settings(target, planned, config, shape, args.init_from, processes))
    if config.minutes is not None and not args.init_from and not Run(args.out).begun:
        check_time(target, options, config, left(), time.perf_counter() - began, own=plan is not None)
    if rank == 0 and (args.estimate or not (Run(args.out).begun or config.minutes)):  # --minutes says what fits
        with waiting(console, "measuring"):
            lines = estimate_lines(args, target, options, config, planned, plan)
        for line in lines:
            console.print(line, soft_wrap=True)
    if args.estimate:
        return
    folder = args.data or args.out / "data"
    if plan is not None and (config.minutes is None or not Run(args.out).begun):  # a begun run has all its data
        clock = None if config.minutes is None else Clock.of(left())
        made, _ = make_texts(target, folder, *plan, console, clock)
        console.print(f"{made.rows} texts, {made.answer_tokens} tokens written by {target.name}")
    texts = read_texts(folder, target)
    with LiveTraining(config.updates, console, read_journal(args.out)) as live:
        done = train(
            target,
            texts,
            args.out,
            options=options,
            config=config,
            shape=shape,
            init_from=args.init_from,
            watcher=live,
            seconds=None if config.minutes is None else left(),
        )
    if rank > 0:
        return
    with disk_errors(args.out):
        report = write_report(args.out, facts(target, config, shape, len(texts), done))
    figure = f"{done.tokens_per_step:.2f} tokens/step simulated on held-out texts"
    simulated = figure if done.tokens_per_step else "not simulated, for lack of time"
    console.print(
        f"{simulated}, {done.parameters / 1e6:.1f} M "
        f"parameters, {done.seconds / 60:.1f} minutes of training\n"
        f"try it:  redrafter compare {f'--model {args.model} ' if args.model else ''}--drafter {args.out}"
    )
    console.note(f"curves in {report}")


def estimate_lines(
    args: argparse.Namespace,
    target: "Target",
    options: DrafterOptions,
    config: TrainConfig,
    drafter: "DrafterConfig",
    plan: tuple[DistillConfig, dict[str, Any]] | None,
) -> list[str]:
    """What the run will take, measured a little longer for somebody who asks for nothing else."""
    from redrafter.train.estimate import ASKED, BEFORE_A_RUN, Plan, estimate, measure

    data, sources = plan or (None, {})
    prompts, documents = len(sources.get("prompts") or ()), len(sources.get("documents") or ())
    most = 0 if data is None or documents else data.texts
    texts = most if sources.get("self_prompt") else min(most, prompts)
    run = Plan(options, config, drafter, data, texts, min(prompts, texts), args.init_from)
    return estimate(target, run, measure(target, run, ASKED if args.estimate else BEFORE_A_RUN))


def facts(target: "Target", config: TrainConfig, shape: Shape, texts: int, done: "Trained") -> dict[str, Any]:
    return {
        "target": target.name,
        "texts": texts,
        "parameters": done.parameters,
        "updates": done.updates,
        "minutes of training": round(done.seconds / 60, 1),
        f"best tokens/step, simulated at {shape.label}": round(done.tokens_per_step, 3),
        **dataclasses.asdict(config),
    }
