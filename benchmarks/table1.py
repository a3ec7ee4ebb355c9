"""The papers' Table 1 on a GPU: plain, Medusa, EAGLE, recurrent; a small model's behaviour at a large one's cost.

    python benchmarks/table1.py --drafters RUNS --shape vicuna-7b

RUNS is what benchmarks/peers.py made. The target and all drafters are widened. The target's pass is compiled, for plain
decoding's one token and once for all drafters; the rest of a step is recorded as it is, which takes seconds instead of
a minute for each contender (`--whole` compiles it too). Contenders take turns, prompt by prompt; times are each
answer's median over the rounds. Results are written after each part (a suite at a temperature).
"""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import arguments
from redrafter.bench.contenders import REFERENCE, Ours, Task
from redrafter.bench.runs import Run, RunConfig, digest
from redrafter.bench.statistics import Record, headline, summaries
from redrafter.bench.suites import questions
from redrafter.config import Shape
from redrafter.core.accept import Accepted
from redrafter.core.step import Drafter
from redrafter.drafters import EagleDrafter, MedusaDrafter, NoDrafter, RecurrentDrafter, checkpoint
from redrafter.drafters.load import bind
from redrafter.drafters.widen import parameters_per_draft_step, widen_drafter
from redrafter.drafters.widen_peers import parameters_read, widen_eagle, widen_medusa
from redrafter.engine import Engine
from redrafter.results import check_new, write_results
from redrafter.runtime.compiled import Programs
from redrafter.targets import Target, load_target, widen
from redrafter.targets.load import parse_dtype
from wide import label

SUITES = ("mt_bench", "alpaca_eval")
NAMES = ("medusa", "eagle", "recurrent")


def widened(folder: Path, small: Target, target: Target, budget: str) -> tuple[Drafter, int]:
    """A drafter's twin, and the parameters it reads in each draft step (Medusa: in its only one)."""
    net = checkpoint.read_for(folder, small)
    drafter = bind(net, small)
    if isinstance(drafter, MedusaDrafter):
        peer = widen_medusa(drafter, target)
        return peer, parameters_read(peer)
    if isinstance(drafter, EagleDrafter):
        wide = widen_eagle(drafter, target)
        return wide, parameters_read(wide)
    assert isinstance(drafter, RecurrentDrafter)
    own = widen_drafter(drafter, target, budget)
    return own, parameters_per_draft_step(own)


class Reading:
    """A drafter that is handed more hidden states than it reads: one compiled pass then serves all of them."""

    def __init__(self, drafter: Any, layers: tuple[int, ...], hidden_size: int) -> None:
        self.drafter, self.layers, self.default_shape = drafter, layers, drafter.default_shape
        self.draft, self.keep = drafter.draft, drafter.keep
        self.starts = [layers.index(layer) * hidden_size for layer in drafter.layers]
        self.size = hidden_size

    def own(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden[..., start : start + self.size] for start in self.starts], -1)

    def begin(self, tokens: Tensor, lengths: Tensor, hidden: Tensor, slots: int) -> Any:
        return self.drafter.begin(tokens, lengths, self.own(hidden), slots)

    def advance(self, state: Any, accepted: Accepted, hidden: Tensor) -> Any:
        return self.drafter.advance(state, accepted, self.own(hidden))


def warm_up(contender: Ours, temperatures: list[float], tokens: int) -> float:
    """Compile and record what the measured answers need: the same sizes, cold and hot."""
    began = time.perf_counter()
    prompt = contender.engine.encode([{"role": "user", "content": "Hello!"}])
    for temperature in temperatures:
        contender.answer(Task([prompt], [1], temperature, tokens))
    return time.perf_counter() - began


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "table1_gpu.json")
    parser.add_argument("--drafters", type=Path, required=True, help="a folder with medusa, eagle and recurrent in it")
    parser.add_argument("--contenders", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--shape", default="vicuna-7b", help="whose cost (default vicuna-7b)")
    parser.add_argument("--model", help="the small target, converted already (default: the embedded one)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", default="120M", help="parameters the recurrent drafter reads per draft step")
    parser.add_argument("--beam", default="16x5:63", metavar="WxL:N")
    parser.add_argument("--prompts", type=int, default=8, help="of each suite (default 8)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--whole", action="store_true", help="compile all of a step, a minute or so for each contender")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no further part after this long")
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    began = time.perf_counter()
    small = load_target(args.model, dtype="fp32", device="cpu")
    model = widen(small.model, args.shape, dtype=parse_dtype(None, args.device), device=args.device)
    target = load_target(model, tokenizer=small.tokenizer)
    shape = Shape.of(args.beam)
    rows: list[dict[str, Any]] = []
    contenders: list[Ours] = []
    twins = {name: widened(args.drafters / name, small, target, args.budget) for name in args.contenders}
    every = max((drafter.layers for drafter, _ in twins.values()), key=len)
    for name in (REFERENCE, *args.contenders):
        drafter: Drafter = NoDrafter()
        read = 0
        if name != REFERENCE:
            drafter, read = twins[name]
            if set(drafter.layers) < set(every):
                drafter = Reading(drafter, every, target.hidden_size)
        engine = Engine(target, drafter, shape=None if name == REFERENCE else shape, runtime="graphs")
        if engine.programs is not None:
            engine.programs = Programs(target, drafter, engine.rule, compiles=True, whole=args.whole)
        contender = Ours(name, engine)
        seconds = warm_up(contender, args.temperatures, args.tokens)
        row = {"part": "prepare", "contender": name, "seconds": round(seconds, 1), "parameters_per_draft_step": read}
        row["recorded"] = engine.programs is not None and not engine.programs.hopeless
        rows.append(row)
        contenders.append(contender)
        print(f"{time.perf_counter() - began:.0f} s", row, flush=True)
    records: list[Record] = []
    for temperature in args.temperatures:
        for suite in SUITES:
            if time.perf_counter() - began > args.seconds:
                print("no time for", suite, temperature, flush=True)
                continue
            records += play(contenders, suite, temperature, args)
            found = summaries(records, REFERENCE)
            labelled = [{"target": label(args.shape), "beam": args.beam} | r for r in rows + found]
            write_results(args.save, headline(found, REFERENCE), labelled)
            for r in found[-len(contenders) :]:
                said = {k: r[k] for k in ("contender", "tokens_per_step", "speedup", "speedup_with_prompt", "equal")}
                print(f"{time.perf_counter() - began:.0f} s", suite, temperature, said, flush=True)


def play(contenders: list[Ours], suite: str, temperature: float, args: Any) -> list[Record]:
    """Everybody answers the first turn of the same questions."""
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
        run = Run(Path(folder), config)
        for _ in run.play(contenders, asked, engine):
            pass
        return run.records


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
