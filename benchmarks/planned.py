"""The planner of steps on recorded probabilities, with known prices: how near it comes to the best choice.

    python benchmarks/planned.py

data/planner_probabilities.npz holds, for every position of 24 MT-Bench answers of 64 tokens (SmolLM2-135M-Instruct, its
recurrent drafter with n-grams, beam 4x5, 16 nodes, T = 0 and 1), what the drafter said of its nodes and which of them
the text accepts. A simulated text goes from position to position by the tokens that a step accepts.

planner: `redrafter.planning`, which is told what passes and drafts cost and nothing else. threshold: the best of many
fixed thresholds, each of which verifies all nodes above it, with as many levels of the draft as these need.
oracle: chooses in each step, after a whole draft and knowing all its probabilities, what promises the most tokens for
the time of the levels that it used. unknowing: the planner, with every guess thought to be equally likely.

The rows with `rows` are those of a GPU: so many texts at once, at the first prices of a 7B model on an H200, each text
twice. The planner chooses one step late how many nodes of all texts are verified, and the likeliest ones are. fixed:
the best of all numbers that it may choose, in each step the same. unknowing: planner and choice of nodes see no
probabilities.
All figures are simulated.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/planned.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.common import HERE, arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter.config import SamplingParams, Shape
from redrafter.planning.calibration import MOST, POWER
from redrafter.planning.costs import ON_GPU, Costs
from redrafter.planning.late import Action, LatePlanner, Load
from redrafter.planning.planner import Planner
from redrafter.results import check_new, write_results
from redrafter.runtime.flat_pass import padded_size
from redrafter.runtime.host_tree import HostNodes
from redrafter.runtime.launched import StepResult
from redrafter.runtime.row import Request, Row, RowOutput

DATA = HERE / "data" / "planner_probabilities.npz"
LEVELS = 5
THRESHOLDS = [0.05 * i for i in range(1, 20)]


@dataclass(frozen=True)
class Prices:
    """Milliseconds of passes over 0, 1, 2, ... tokens, of a level of a draft, and of a draft besides."""

    passes: Sequence[float]
    level: float
    fixed: float

    def draft(self, levels: float) -> float:
        return self.fixed + self.level * levels


PRICES = {
    "measured": Prices([0, 8.0, 9.6, 10.9, 13.0, 15.4, 17.8, 21, 24, 27, 30, 33, 36, 39, 42, 45, 47.7], 0.67, 0.3),
    "quiet": Prices([0, 7.5, 8.2, 8.9, 10.4, 11.3, 12.2, 13.8, 15.5, *(15.5 + 1.7 * i for i in range(1, 9))], 0.3, 0.3),
}
"""SmolLM2-135M in 4 bits on two cores: cpu.json's passes with the draft of a path, and passes on a quieter machine."""


@dataclass(frozen=True)
class Position:
    """One position of a text: the drafted nodes behind it."""

    said: np.ndarray  # probability of each node's path
    accepted: np.ndarray
    depths: np.ndarray
    parents: list[int]  # ids from 1; 0 is the root
    left: int  # tokens of the text


def texts(temperature: str, most: int = 99) -> Iterator[list[Position]]:
    """The positions of each text, "t0" or "t1"; at most so many texts."""
    data = np.load(DATA)
    logs, accepted, depths, left, text = (
        data[f"{temperature}_{name}"] for name in ("log_probability", "accepted", "depth", "left", "text")
    )
    said = np.where(np.isfinite(logs), np.exp(logs.astype(float)), 0.0)
    for number in range(min(most, text.max() + 1)):
        yield [
            Position(said[i], accepted[i], depths[i], parents_of(said[i], accepted[i], depths[i]), int(left[i]))
            for i in np.flatnonzero(text == number)
        ]


def parents_of(said: np.ndarray, accepted: np.ndarray, depths: np.ndarray) -> list[int]:
    """Parents that fit: an accepted node's is accepted, another's the least likely node that is as likely as itself."""
    found = []
    for node in range(len(said)):
        above = [i for i in range(node) if depths[i] == depths[node] - 1 and said[i] >= said[node] > 0]
        if accepted[node]:
            above = [i for i in above if accepted[i]] or above
        found.append(1 + min(above, key=lambda i: said[i]) if above else 0)
    return found


class KnownCosts(Costs):
    """Costs that are told."""

    def __init__(self, prices: Prices) -> None:
        super().__init__()
        self.told = prices

    @property
    def known(self) -> bool:
        return True

    @property
    def after_draft(self) -> float:
        return 0.0

    def of_pass(self, tokens: int, slots: int = 0, drafted: bool = False) -> float:  # noqa: ARG002
        return self.told.passes[tokens]

    def learn_pass(self, *_: object) -> None:
        """Known."""

    def learn_draft(self, *_: object) -> None:
        """Known."""

    def more(self, tokens: int, nodes: int) -> float:
        passes = self.told.passes
        return passes[tokens + nodes] - passes[tokens] if tokens + nodes < len(passes) else 1e9

    def of_draft(self, rows: int, width: int, levels: float, sampled: int = 0) -> float:  # noqa: ARG002
        return self.told.draft(levels)


def drafted(position: Position, until: float, blind: bool) -> HostNodes:
    """The nodes of a draft that ends as the search does."""
    levels = LEVELS
    for depth in range(1, LEVELS + 1):
        here = position.said[position.depths == depth]
        if not here.size or here.max() < until:
            levels = depth
            break
    real = (position.said > 0) & (position.depths <= levels)
    said = 0.5 ** position.depths.astype(float) if blind else position.said
    scores = np.where(real, np.log(np.maximum(said, 1e-30)), -np.inf)
    tokens = np.where(position.accepted, 1, 2)
    return HostNodes([tokens.tolist()], [position.parents], [position.depths.tolist()], [scores.tolist()], levels)


def of_planner(temperature: str, prices: Prices, blind: bool = False, most: int = 99) -> dict[str, float]:
    """The planner's speedup over plain decoding. blind: it sees no probabilities."""
    planner = Planner(Shape(width=4, length=LEVELS, nodes=15), copies=False)
    planner.costs = KnownCosts(prices)
    spent = tokens = steps = nodes = 0.0
    for text in texts(temperature, most):
        row = Row(Request(prompt=[0], max_new_tokens=99, seed=0, sampling=SamplingParams()), 0)
        planner.open(row, [0], sampled=False)
        i = 0
        while i < len(text):
            position = text[i]
            plan = planner.choose({row: position.left})
            gained = 1
            if plan.shape is not None:
                tree = plan.pack([row], drafted(position, plan.shape.until, blind), torch.tensor([0]))
                gained += int((tree.tokens[0, 1:] == 1).sum())
                spent += prices.draft(plan.levels)
            gained = max(1, min(gained, position.left))
            spent += prices.passes[1 + plan.nodes]
            planner.learn(plan, {row: [1] * (gained - 1) + [3]}, (0.0, 0.0))
            i, tokens, steps, nodes = i + gained, tokens + gained, steps + 1, nodes + plan.nodes
        planner.close(row)
    return {"speedup": tokens / spent * prices.passes[1], "tokens_per_step": tokens / steps, "nodes": nodes / steps}


def of_threshold(temperature: str, prices: Prices, least: float, most: int = 99) -> float:
    """The speedup where a step verifies all nodes whose path is as likely as this."""
    spent = tokens = 0.0
    for text in texts(temperature, most):
        i = 0
        while i < len(text):
            position = text[i]
            order = np.argsort(-position.said, kind="stable")
            chosen = [k for k in order if position.said[k] ** POWER >= least and position.depths[k] <= position.left][
                :15
            ]
            deepest = max((int(position.depths[k]) for k in chosen), default=0)
            gained = min(1 + int(position.accepted[chosen].sum()), position.left)
            spent += prices.passes[1 + len(chosen)] + prices.draft(min(deepest + 1, LEVELS))
            tokens, i = tokens + gained, i + max(1, gained)
    return tokens / spent * prices.passes[1]


def of_oracle(temperature: str, prices: Prices, most: int = 99) -> float:
    """The speedup where each step takes the number of levels and of nodes that promises the most tokens per time."""
    spent = tokens = 0.0
    for text in texts(temperature, most):
        i = 0
        while i < len(text):
            position = text[i]
            likely = position.said**POWER
            order = [k for k in np.argsort(-likely, kind="stable") if likely[k] > 0]
            best, chosen, levels = 1 / (prices.passes[1] + prices.draft(1)), [], 1
            for deepest in range(1, LEVELS + 1):
                expected = 1.0
                usable = [k for k in order if position.depths[k] <= deepest][: len(prices.passes) - 2]
                used = min(deepest + 1, LEVELS)
                for count, k in enumerate(usable, 1):
                    expected += likely[k]
                    rate = expected / (prices.passes[count + 1] + prices.draft(used))
                    if rate > best:
                        best, chosen, levels = rate, usable[:count], used
            gained = min(1 + int(position.accepted[chosen].sum()), position.left)
            spent += prices.passes[len(chosen) + 1] + prices.draft(levels)
            tokens, i = tokens + gained, i + max(1, gained)
    return tokens / spent * prices.passes[1]


def compare(temperature: str, prices: Prices, most: int) -> dict[str, float]:
    """All ways to choose, at these prices."""
    planner = of_planner(temperature, prices, most=most)
    found = {
        "planner": planner["speedup"],
        "threshold": max(of_threshold(temperature, prices, least, most) for least in THRESHOLDS),
        "oracle": of_oracle(temperature, prices, most),
        "unknowing": of_planner(temperature, prices, blind=True, most=most)["speedup"],
        "tokens_per_step": planner["tokens_per_step"],
        "nodes": planner["nodes"],
    }
    return {name: round(value, 3) for name, value in found.items()}


class KnownGpuCosts(Costs):
    """The first prices of a GPU, with a pass over one token of 3.87 ms; nothing is learned."""

    def __init__(self) -> None:
        super().__init__(ON_GPU)
        self.passes.unit = 3.87e-3
        self.drafts.unit = self.passes.unit * ON_GPU.draft

    def learn_pass(self, *_: object) -> None:
        """Known."""

    def learn_draft(self, *_: object) -> None:
        """Known."""


BEAM = Shape(width=4, length=LEVELS)


def budgets(rows: int) -> list[int]:
    """Nodes of all rows that leave no padding in a pass."""
    sizes = {padded_size(n) for n in range(rows + 1, 17 * rows + 1)}
    return sorted({min(size - rows, 16 * rows) for size in sizes})


def at_once(temperature: str, rows: int, nodes: int | None, blind: bool = False, most: int = 99) -> dict[str, float]:
    """The speedup of so many texts at once over plain decoding. nodes: of all rows; None: the planner chooses."""
    costs, waiting = KnownGpuCosts(), 2 * list(texts(temperature, most))
    planner, choices = LatePlanner(lambda _: [BEAM], costs), budgets(rows)
    drafts = [Action(BEAM, n, padded_size(rows + n)) for n in choices]
    load = Load(rows, places=rows, tokens=rows, slots=200 * rows)
    running: list[tuple[Row, list[Position], int]] = []
    late: tuple[Action, StepResult] | None = None
    spent, tokens, chosen = 0.0, 0, []
    while len(waiting) + len(running) >= rows:  # all rows are busy
        while len(running) < rows:
            row = Row(Request(prompt=[0], max_new_tokens=99, seed=0, sampling=SamplingParams()), len(running))
            running.append((row, waiting.pop(), 0))
            planner.begin(1 / rows)
        action = planner.choose(load, drafts, lambda _: True) if nodes is None else Action(BEAM, nodes, 0)
        action = replace(action, tokens=padded_size(rows + action.nodes))
        promises, gains = verified([text[i] for _, text, i in running], action.nodes, choices, blind)
        spent += planner.seconds(action, load)
        chosen.append(action.nodes)
        outputs = []
        for (row, text, i), promised, gained in zip(running, promises, gains, strict=True):
            left = text[i].left
            done = gained >= left or i + gained >= len(text)
            tokens += min(gained, left)
            outputs.append((row, RowOutput([], drafted=gained - 1, done=done, steps=1, promised=promised)))
        running = [(r, t, i + g) for (r, t, i), g, (_, o) in zip(running, gains, outputs, strict=True) if not o.done]
        if late is not None:
            planner.learn(load, *late, choices, resumed=False)
        late = action, StepResult(action.shape, outputs, rows, 0.0)
    plain = rows / costs.of_pass(rows, load.slots)
    return {"speedup": tokens / spent / plain, "nodes": float(np.mean(chosen)) / rows}


def verified(
    positions: Sequence[Position], nodes: int, choices: Sequence[int], blind: bool
) -> tuple[list[list[float]], list[int]]:
    """By row: what each number of nodes promises, and the tokens of a step with the likeliest nodes of all rows."""
    likely = []
    for row, position in enumerate(positions):
        said = np.where(position.said > 0, 0.5 ** position.depths.astype(float), 0) if blind else position.said
        calibrated = np.minimum(said**POWER, MOST**position.depths)
        likely += [(-p, int(position.depths[k]), row, k) for k, p in enumerate(calibrated) if p > 0]
    likely.sort()
    sums = np.zeros((len(choices), len(positions)))
    gains = [1] * len(positions)
    for place, (p, _, row, k) in enumerate(likely):
        sums[[place < choice for choice in choices], row] -= p
        gains[row] += bool(place < nodes and positions[row].accepted[k])
    return sums.T.tolist(), gains


def compare_at_once(temperature: str, rows: int, most: int) -> dict[str, float]:
    """The planner one step late beside the best fixed number of nodes."""
    planner = at_once(temperature, rows, None, most=most)
    found = {
        "planner": planner["speedup"],
        "fixed": max(at_once(temperature, rows, n, most=most)["speedup"] for n in budgets(rows)),
        "unknowing": at_once(temperature, rows, None, blind=True, most=most)["speedup"],
        "nodes": planner["nodes"],
    }
    return {name: round(value, 3) for name, value in found.items()}


def smoke(_: TinyFiles) -> list[object]:
    return ["--prices", "quiet", "--temperatures", "t0", "--texts", 2, "--rows", 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "planned.json")
    parser.add_argument("--prices", nargs="+", choices=PRICES, default=list(PRICES))
    parser.add_argument("--temperatures", nargs="+", choices=("t0", "t1"), default=["t0", "t1"])
    parser.add_argument("--texts", type=int, default=99, help="at most so many of the recorded texts")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 16, 32], help="texts at once on a GPU")
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    rows: list[dict[str, Any]] = [
        {"prices": name, "temperature": temperature, **compare(temperature, PRICES[name], args.texts)}
        for name in args.prices
        for temperature in args.temperatures
    ]
    headline = {"simulated": 1, "least_planner_to_threshold": min(row["planner"] / row["threshold"] for row in rows)}
    late = [
        {"rows": count, "temperature": temperature, **compare_at_once(temperature, count, args.texts)}
        for count in args.rows
        for temperature in args.temperatures
    ]
    if late:
        headline["least_planner_to_fixed"] = min(row["planner"] / row["fixed"] for row in late)
    rows += late
    write_results(args.save, {name: round(value, 3) for name, value in headline.items()}, rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
