"""The papers' Table 1 on a GPU: plain decoding, Medusa, EAGLE and the recurrent drafter, with widened models.

    python benchmarks/table1.py --drafters RUNS --shape vicuna-7b

RUNS is the output folder of benchmarks/peers.py. The target and all drafters are widened. The target's forward pass is
compiled twice: for plain decoding, and for all drafters. The rest of a step is recorded without compilation, which
takes seconds instead of a minute per contender (`--whole` compiles it too). Contenders take turns, prompt by prompt;
times are the medians of each answer over the rounds. Results are written after each suite and temperature.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/table1.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from benchmarks.widen import widen
from benchmarks.widen.drafter import BUDGETS, parameters_per_draft_step, widen_recurrent
from benchmarks.widen.load import SMOKE, label, shape_named
from benchmarks.widen.peers import parameters_read, widen_eagle, widen_medusa
from redrafter.bench.contenders import REFERENCE, Ours, PromptBatch
from redrafter.bench.runs import BenchmarkRun, RunConfig, digest
from redrafter.bench.statistics import Record, headline, summaries
from redrafter.bench.suites import questions
from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.step import Drafter
from redrafter.drafters import EagleDrafter, MedusaDrafter, NoDrafter, RecurrentDrafter, checkpoint
from redrafter.drafters.load import bind
from redrafter.engine import Engine
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target
from redrafter.targets.load import parse_dtype

SUITES = ("mt_bench", "alpaca_eval")
NAMES = ("medusa", "eagle", "recurrent")


def load_widened(folder: Path, small: Target, target: Target, budget: str | int) -> tuple[Drafter, int]:
    """Return the widened drafter, and the parameters it reads per draft step (Medusa has one draft step)."""
    net = checkpoint.read_for(folder, small)
    drafter = bind(net, small)
    if isinstance(drafter, MedusaDrafter):
        peer = widen_medusa(drafter, target, BUDGETS[budget] if isinstance(budget, str) else budget)
        return peer, parameters_read(peer)
    if isinstance(drafter, EagleDrafter):
        wide = widen_eagle(drafter, target)
        return wide, parameters_read(wide)
    assert isinstance(drafter, RecurrentDrafter)
    own = widen_recurrent(drafter, target, budget)
    return own, parameters_per_draft_step(own)


class LayerSelector:
    """Gives a drafter only the hidden states it reads, so that one compiled target pass serves all drafters."""

    def __init__(self, drafter: Any, layers: tuple[int, ...], hidden_size: int) -> None:
        self.drafter, self.layers, self.default_shape = drafter, layers, drafter.default_shape
        self.draft, self.keep = drafter.draft, drafter.keep
        self.starts = [layers.index(layer) * hidden_size for layer in drafter.layers]
        self.size = hidden_size

    def select(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden[..., start : start + self.size] for start in self.starts], -1)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return self.drafter.begin(tokens, lengths, self.select(hidden), slots)

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        return self.drafter.advance(state, accepted, self.select(hidden))


def warm_up(contender: Ours, temperatures: list[float], tokens: int) -> float:
    """Compile and record the steps that the measured answers need, and return the seconds it took."""
    began = time.perf_counter()
    prompt = contender.engine.encode([{"role": "user", "content": "Hello!"}])
    for temperature in temperatures:
        contender.answer(PromptBatch([prompt], [1], temperature, tokens))
    return time.perf_counter() - began


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--device", "cpu", "--drafters", tiny.drafters, "--suites", tiny.questions]
    words += ["--shape", SMOKE, "--budget", 200_000, "--beam", "2x3:4"]
    return [*words, "--prompts", 1, "--tokens", 4, "--rounds", 1, "--temperatures", 0.0]


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "table1_gpu.json")
    parser.add_argument("--drafters", type=Path, required=True, help="folder with medusa, eagle and recurrent")
    parser.add_argument("--contenders", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--shape", default="vicuna-7b", help="shape of the widened target (default vicuna-7b)")
    parser.add_argument("--model", help="the small target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", default="120M", help="parameters that recurrent and medusa read per draft step")
    parser.add_argument("--beam", default="16x5:63", metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=8, help="questions per suite (default 8)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--whole", action="store_true", help="compile whole steps: about a minute per contender")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no further suite after this many seconds")
    parser.add_argument("--suites", nargs="+", default=list(SUITES))
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    began = time.perf_counter()
    small = load_target(args.model, dtype="fp32", device="cpu")
    model = widen(small.model, shape_named(args.shape), dtype=parse_dtype(None, args.device), device=args.device)
    target = load_target(model, tokenizer=small.tokenizer)
    shape = Shape.of(args.beam)
    rows: list[dict[str, Any]] = []
    contenders: list[Ours] = []
    budget = int(args.budget) if args.budget.isdigit() else args.budget
    drafters = {name: load_widened(args.drafters / name, small, target, budget) for name in args.contenders}
    layers = max((drafter.layers for drafter, _ in drafters.values()), key=len)
    for name in (REFERENCE, *args.contenders):
        drafter: Drafter = NoDrafter()
        read = 0
        if name != REFERENCE:
            drafter, read = drafters[name]
            if set(drafter.layers) < set(layers):
                drafter = LayerSelector(drafter, layers, target.hidden_size)
        engine = Engine(target, drafter, shape=None if name == REFERENCE else shape, runtime="compiled")
        engine.compiles_step = args.whole
        contender = Ours(name, engine)
        seconds = warm_up(contender, args.temperatures, args.tokens)
        row = {"part": "prepare", "contender": name, "seconds": round(seconds, 1), "parameters_per_draft_step": read}
        row["recorded"] = engine.recorded
        rows.append(row)
        contenders.append(contender)
        print(f"{time.perf_counter() - began:.0f} s", row, flush=True)
    records: list[Record] = []
    for temperature in args.temperatures:
        for suite in args.suites:
            if time.perf_counter() - began > args.seconds:
                print("out of time, skipped", suite, temperature, flush=True)
                continue
            records += answer_suite(contenders, suite, temperature, args)
            found = summaries(records, REFERENCE)
            labelled = [{"target": label(args.shape), "beam": args.beam} | r for r in rows + found]
            write_results(args.save, headline(found, REFERENCE), labelled)
            for r in found[-len(contenders) :]:
                said = {k: r[k] for k in ("contender", "tokens_per_step", "speedup", "speedup_with_prompt", "equal")}
                print(f"{time.perf_counter() - began:.0f} s", suite, temperature, said, flush=True)


def answer_suite(contenders: list[Ours], suite: str, temperature: float, args: Any) -> list[Record]:
    """Let all contenders answer the first turn of the same questions."""
    engine, asked = contenders[0].engine, questions(suite, args.prompts, 1)
    config = RunConfig(
        suite=suite,
        questions=digest([asdict(q) for q in asked]),
        model=checkpoint.identity(engine.target),
        contenders=tuple(c.name for c in contenders),
        shapes=(args.beam,),
        temperatures=(temperature,),
        max_new_tokens=args.tokens,
        rounds=args.rounds,
        dtype=str(engine.target.dtype),
        device=args.device,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = BenchmarkRun(Path(folder), config)
        for _ in run.play(contenders, asked, engine):
            pass
        return run.records


if __name__ == "__main__":
    main()
