"""The papers' Table 1 on a GPU: plain decoding, Medusa, EAGLE and the recurrent drafter, with widened models.

    python benchmarks/table1.py --drafters RUNS --prepare              # while another program runs
    python benchmarks/table1.py --drafters RUNS --shape vicuna-7b

RUNS is the output folder of benchmarks/peers.py. The target and all drafters are widened. Each drafter takes part with
n-grams, as `drafter="auto"` runs it, and alone. Steps are compiled and recorded: about half a minute for each
contender and temperature, or 5 seconds if the compiler's caches know the step. `--prepare` fills these caches and
measures nothing; without `--drafters`, the drafters are not trained, and Medusa's tree will have another shape later.
Without `--prepare`, no further contender is made ready after `--prepare-seconds`.
Contenders take turns, prompt by prompt; times are the medians of each answer over the rounds. Results are written after
each suite and temperature.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/table1.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments, parse
from benchmarks.peers import RECIPES
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
from redrafter.core.rules import Search
from redrafter.core.step import Drafter
from redrafter.core.tree import Tree
from redrafter.drafters import EagleDrafter, MedusaDrafter, NoDrafter, RecurrentDrafter, WithNgrams, checkpoint
from redrafter.drafters.base import DrafterNet
from redrafter.drafters.load import bind
from redrafter.engine import Engine
from redrafter.results import check_new, write_results
from redrafter.targets import Target, load_target
from redrafter.targets.load import parse_dtype

SUITES = ("mt_bench", "alpaca_eval")
NAMES = ("recurrent", "eagle", "medusa")
ALONE = " alone"
"""Added to the name of a drafter that guesses without n-grams."""


def read_network(name: str, folder: Path | None, small: Target) -> DrafterNet:
    """The network in folder/name; without a folder, one that is not trained."""
    if folder is not None:
        return checkpoint.read_for(folder / name, small)
    options, _ = RECIPES[name]
    return checkpoint.make(options.config_for(small))


def widened(net: DrafterNet, small: Target, target: Target, budget: int, medusa_budget: int) -> tuple[Drafter, int]:
    """Return the widened drafter, and the parameters it reads per draft step (Medusa has one draft step)."""
    drafter = bind(net, small)
    if isinstance(drafter, MedusaDrafter):
        peer = widen_medusa(drafter, target, medusa_budget)
        return peer, parameters_read(peer)
    if isinstance(drafter, EagleDrafter):
        wide = widen_eagle(drafter, target)
        return wide, parameters_read(wide)
    assert isinstance(drafter, RecurrentDrafter)
    own = widen_recurrent(drafter, target, budget)
    return own, parameters_per_draft_step(own)


class LayerSelector:
    """Gives a drafter only the hidden states it reads, so that one compiled target pass serves all drafters."""

    def __init__(self, drafter: Drafter, layers: tuple[int, ...], hidden_size: int) -> None:
        self.drafter, self.layers, self.default_shape = drafter, layers, drafter.default_shape
        self.starts = [layers.index(layer) * hidden_size for layer in drafter.layers]
        self.size = hidden_size

    def select(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden[..., start : start + self.size] for start in self.starts], -1)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return self.drafter.begin(tokens, lengths, self.select(hidden), slots)

    def draft(self, state: Any, last: Tensor, search: Search) -> Tree:
        return self.drafter.draft(state, last, search)

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        return self.drafter.advance(state, accepted, self.select(hidden))

    def keep(self, state: Any, rows: Tensor) -> Any:
        return self.drafter.keep(state, rows)


def ready(name: str, target: Target, drafter: Drafter, args: argparse.Namespace) -> tuple[Ours, bool]:
    """A contender whose steps are compiled and recorded, and whether whole steps are compiled.

    A step that cannot be compiled as a whole is recorded with the target's pass compiled alone.
    """
    for whole in (True, False) if args.whole else (False,):
        engine = Engine(target, drafter, shape=None if name == REFERENCE else Shape.of(args.beam), runtime="compiled")
        engine.compiles_step = whole
        contender = Ours(name, engine)
        warm_up(contender, args.temperatures, args.tokens)
        if recorded(engine) or not engine.recorded:
            break
    print(f"{name} promises {contender.exactness}", flush=True)  # tried now, so that no measured answer waits for it
    return contender, whole


def warm_up(contender: Ours, temperatures: list[float], tokens: int) -> float:
    """Compile and record the steps that the measured answers need, and return the seconds it took."""
    began = time.perf_counter()
    prompt = contender.engine.encode([{"role": "user", "content": "Hello!"}])
    for temperature in temperatures:
        contender.answer(PromptBatch([prompt], [1], temperature, tokens))
    return time.perf_counter() - began


def recorded(engine: Engine) -> bool:
    """Whether all steps that the engine has run are recorded. On a CPU none is."""
    steps = [step for batch in engine._idle if batch.steps is not None for step in batch.steps.steps.values()]
    return engine.recorded and None not in steps


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--device", "cpu", "--drafters", tiny.drafters, "--suites", tiny.questions]
    words += ["--shape", SMOKE, "--budget", 200_000, "--medusa-budget", 200_000, "--beam", "2x3:4"]
    return [*words, "--prompts", 1, "--tokens", 4, "--rounds", 1, "--temperatures", 0.0]


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "table1_gpu.json")
    parser.add_argument("--drafters", type=Path, help="folder with medusa, eagle and recurrent")
    parser.add_argument("--prepare", action="store_true", help="fill the compiler's caches, and measure nothing")
    parser.add_argument("--contenders", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--ngrams", default="both", choices=("with", "without", "both"), help="(default both)")
    parser.add_argument("--shape", default="vicuna-7b", help="shape of the widened target (default vicuna-7b)")
    parser.add_argument("--model", help="the small target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", default="100M", help="parameters that recurrent reads per draft step")
    parser.add_argument("--medusa-budget", default="120M", help="the same for medusa, which needs 119.6 M at 7B cost")
    parser.add_argument("--beam", default="16x5:63", metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=8, help="questions per suite (default 8)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--whole", action=argparse.BooleanOptionalAction, default=True, help="compile whole steps")
    parser.add_argument("--prepare-seconds", type=float, default=130.0, help="add no contender after this time")
    parser.add_argument("--seconds", type=float, default=180.0, help="start no suite but the first after this time")
    parser.add_argument("--suites", nargs="+", default=list(SUITES))
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite or args.prepare)
    if not args.prepare and args.drafters is None:
        parser.error("give the folder of the drafters: --drafters RUNS, or --prepare")
    logging.basicConfig(level=logging.WARNING)  # a step that cannot be recorded is a warning
    began = time.perf_counter()
    contenders, rows = make_contenders(args, began)
    if args.prepare:
        return
    records: list[Record] = []
    for suite, temperature in [(s, t) for s in args.suites for t in args.temperatures]:
        if records and time.perf_counter() - began > args.seconds:
            print("out of time, skipped", suite, temperature, flush=True)
            continue
        records += answer_suite(contenders, suite, temperature, args)
        found = summaries(records, REFERENCE)
        setting = {"target": label(args.shape), "beam": args.beam}
        labelled = [setting | {"ngrams": with_ngrams(r["contender"])} | r for r in rows + found]
        write_results(args.save, headline(found, REFERENCE), labelled)
        for r in found[-len(contenders) :]:
            said = {k: r[k] for k in ("contender", "tokens_per_step", "speedup", "speedup_with_prompt", "equal")}
            print(f"{time.perf_counter() - began:.0f} s", suite, temperature, said, flush=True)


def with_ngrams(contender: str) -> bool:
    """
    >>> with_ngrams("recurrent"), with_ngrams("recurrent alone"), with_ngrams("plain")
    (True, False, False)
    """
    return contender != REFERENCE and not contender.endswith(ALONE)


def make_contenders(args: argparse.Namespace, began: float) -> tuple[list[Ours], list[dict[str, Any]]]:
    """Plain decoding, the drafters with n-grams and the drafters alone, ready to answer; and a row about each."""
    small = load_target(args.model, dtype="fp32", device="cpu")
    model = widen(small.model, shape_named(args.shape), dtype=parse_dtype(None, args.device), device=args.device)
    target = load_target(model, tokenizer=small.tokenizer)
    budgets = [BUDGETS.get(text) or int(text) for text in (args.budget, args.medusa_budget)]
    networks = {name: read_network(name, args.drafters, small) for name in args.contenders}
    names = [f"{name}{alone}" for alone in ("", ALONE) for name in args.contenders]
    names = [name for name in names if args.ngrams in ("both", "with" if with_ngrams(name) else "without")]
    # One drafter for each contender: n-grams let a recurrent drafter read more tokens than it guesses.
    drafters = {name: widened(networks[name.removesuffix(ALONE)], small, target, *budgets) for name in names}
    layers = max((drafter.layers for drafter, _ in drafters.values()), key=len)
    print(f"{time.perf_counter() - began:.0f} s: models are loaded", flush=True)
    contenders: list[Ours] = []
    rows: list[dict[str, Any]] = []
    for name in (REFERENCE, *names):
        late = time.perf_counter() - began > args.prepare_seconds
        if late and len(contenders) > 1 and not args.prepare:
            print("out of time, left out", name, flush=True)
            continue
        drafter: Drafter = NoDrafter()
        read = 0
        if name != REFERENCE:
            drafter, read = drafters[name]
            if set(drafter.layers) < set(layers):
                drafter = LayerSelector(drafter, layers, target.hidden_size)
            if with_ngrams(name):
                drafter = WithNgrams(drafter)
        start = time.perf_counter()
        contender, compiled = ready(name, target, drafter, args)
        seconds = round(time.perf_counter() - start, 1)
        row = {"part": "prepare", "contender": name, "seconds": seconds, "parameters_per_draft_step": read}
        rows.append(row | {"recorded": recorded(contender.engine), "compiled": compiled and recorded(contender.engine)})
        contenders.append(contender)
        print(f"{time.perf_counter() - began:.0f} s", rows[-1], flush=True)
    return contenders, rows


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
