"""Statistics over records of single answers.

A record is one answer of one contender: `suite`, `question`, `category`, `turn`, `temperature`, `batch`, `contender`,
`tokens` (their number), `seconds`, `first_seconds`, `accepted` (drafted tokens accepted in each step), `equal`
(whether the text equals that of plain decoding; None if not comparable), `exactness`, `tie` (never where the
exactness is bitwise). The prefill gives the first token (`first_tokens`, if it also drafts), the steps give the others.
In a batch of `rows`, `seconds` is the batch's time divided by the number of rows.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Record = dict[str, Any]
RESAMPLES = 2000


def settings(records: Iterable[Record]) -> list[tuple[str, float, int]]:
    """Return every (suite, temperature, batch) of the records, in order."""
    return list(dict.fromkeys((r["suite"], r["temperature"], r["batch"]) for r in records))


def contenders(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(r["contender"] for r in records))


def summaries(records: Sequence[Record], reference: str, by_category: bool = False) -> list[dict[str, Any]]:
    """Return a row per setting and contender; with `by_category`, also per category."""
    rows = []
    for setting in settings(records):
        here = [r for r in records if (r["suite"], r["temperature"], r["batch"]) == setting]
        parts: list[tuple[str, list[Record]]] = [("all", here)]
        if by_category:
            parts += [(c, [r for r in here if r["category"] == c]) for c in dict.fromkeys(r["category"] for r in here)]
        for category, part in parts:
            plain = [r for r in part if r["contender"] == reference]
            for name in contenders(part):
                own = [r for r in part if r["contender"] == name]
                rows.append(
                    {
                        "suite": setting[0],
                        "temperature": setting[1],
                        "batch": setting[2],
                        "category": category,
                        "contender": name,
                    }
                    | summary(own, plain)
                )
    return rows


def headline(rows: Sequence[Record], reference: str) -> dict[str, float]:
    """Return speedup and tokens/step of each contender in the first setting."""
    setting = settings(rows)[0]
    found = {}
    for r in rows:
        if (r["suite"], r["temperature"], r["batch"]) != setting or r["category"] != "all":
            continue
        if r["contender"] != reference and r["speedup"] is not None:
            name = r["contender"].replace(" ", "_").replace("-", "_").replace(".", "_")
            found[f"{name}_speedup"] = round(r["speedup"], 4)
            found[f"{name}_tokens_per_step"] = round(r["tokens_per_step"], 4)
    return found


def summary(own: Sequence[Record], plain: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of one contender, and its speedup over plain decoding of the same prompts."""
    steps = sum(len(r["accepted"]) for r in own)
    compared = [r for r in own if r["equal"] is not None]
    found: dict[str, Any] = {
        "answers": len(own),
        "tokens": sum(r["tokens"] for r in own),
        "tokens_per_step": ratio(sum(decoded(r) for r in own), steps),
        "acceptance_by_depth": by_depth([n for r in own for n in r["accepted"]]),
        "tokens_per_second": ratio(sum(r["tokens"] for r in own), sum(r["seconds"] for r in own)),
        "ms_to_first_token": 1e3 * median([r["first_seconds"] for r in own]),
        "compared": len(compared),
        "equal": sum(bool(r["equal"]) for r in compared),
        "ties": sum(bool(r.get("tie")) for r in compared),
    }
    for name, tokens, seconds in (("speedup", decoded, decoding), ("speedup_with_prompt", whole, entire)):
        low, high = bootstrap(own, plain, tokens, seconds)
        found |= {name: speedup(own, plain, tokens, seconds), f"{name}_low": low, f"{name}_high": high}
    return found


Measure = Callable[[Record], float]


def decoded(record: Record) -> float:
    """Return the tokens that came from steps, without those of the prefill."""
    return float(max(0, record["tokens"] - record.get("first_tokens", 1)))


def decoding(record: Record) -> float:
    """Return the seconds of the steps; in a batch, divided by the number of rows."""
    return max(0.0, float(record["seconds"]) - float(record["first_seconds"]) / int(record["rows"]))


def whole(record: Record) -> float:
    return float(record["tokens"])


def entire(record: Record) -> float:
    return float(record["seconds"])


def speedup(own: Sequence[Record], plain: Sequence[Record], tokens: Measure, seconds: Measure) -> float | None:
    """Return tokens per second of all answers, relative to plain decoding."""
    rates = [ratio(sum(map(tokens, part)), sum(map(seconds, part))) for part in (own, plain)]
    return None if not rates[0] or not rates[1] else rates[0] / rates[1]


def bootstrap(
    own: Sequence[Record],
    plain: Sequence[Record],
    tokens: Measure,
    seconds: Measure,
    share: float = 0.95,
    seed: int = 0,
) -> tuple[float | None, float | None]:
    """Return a bootstrap confidence interval of the speedup over the choice of questions.

    Questions are resampled with all their turns and both contenders' answers, because turns of one question are not
    independent and both contenders write long answers to the same questions.
    """
    names = [q for q in dict.fromkeys(r["question"] for r in own) if any(r["question"] == q for r in plain)]
    if len(names) < 2:
        return None, None
    sums = torch.tensor(
        [
            [
                sum(measure(r) for r in part if r["question"] == name)
                for part in (own, plain)
                for measure in (tokens, seconds)
            ]
            for name in names
        ],
        dtype=torch.float64,
    )  # (Q, 4)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(names), (RESAMPLES, len(names)), generator=generator)
    total = sums[drawn].sum(1)  # (R, 4)
    ratios = (total[:, 0] / total[:, 1]) / (total[:, 2] / total[:, 3])
    ratios = ratios[ratios.isfinite()]
    if not len(ratios):
        return None, None
    edges = torch.quantile(ratios, torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64))
    return float(edges[0]), float(edges[1])


def by_depth(accepted: Sequence[int]) -> list[float]:
    """The share of steps that kept more than d guesses, for d = 0, 1, ...

    >>> by_depth([0, 2, 1, 0])
    [0.5, 0.25]
    """
    return [sum(n > d for n in accepted) / len(accepted) for d in range(max(accepted, default=0))]


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def median(values: Sequence[float]) -> float:
    """
    >>> median([3.0, 1.0, 2.0, 10.0])
    2.5
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    if not ordered:
        return 0.0
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
