"""The Markdown table of model types: which work, and which faster paths they have."""

import re
from collections import defaultdict
from typing import Any

Result = dict[str, Any]

KIND = re.compile(r"a layer of the kind '(\w+)' keeps no keys for each token but ([^,]*)")
REFUSALS = {
    "gives a tree node other logits": "gives a tree node other logits than its path alone",
    "takes positions from the length": "takes positions from the length of the cache",
    "does not take a 4D attention mask": "takes no mask, positions or cache as others do",
    "gives a row other logits": "looks at the longest position of the batch",
}


def families(result: Result) -> str:
    """Model types that have the same answers share a line."""
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in result["rows"]:
        groups[answers(row)].append(row["model_type"])
    order = {"yes": 0, "no:": 1, "not": 2}
    lines = [
        "| model types of transformers | works | fused on a GPU | bitwise on a GPU | packed on a CPU |",
        "|---" * 5 + "|",
    ]
    for group in sorted(groups, key=lambda g: (order[g[0][:3]], g[1] != "yes", g[3] != "yes", g[0])):
        lines.append(f"| {', '.join(groups[group])} | {' | '.join(group)} |")
    head = result["headline"]
    total = sum(head.values())
    return "\n".join(
        [
            f"Of {total} causal LMs of transformers {result['versions']['transformers']}, {head['equal']} give exactly "
            f"transformers' text, {head['refused']} are refused with the reason, {head['wrong']} give another text, "
            f"and {head['not_built']} could not be tried.",
            "",
            *lines,
        ]
    )


def answers(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Works, fused, bitwise, packed."""
    if row["result"] == "equal":
        fused, packed = ("yes" if row[name] else "no" for name in ("fused", "packed"))
        return "yes", fused, "if the trial at load succeeds" if row["fused"] else "no", packed
    return f"{'not tried: ' if row['result'] == 'not_built' else 'no: '}{reason(row)}", "", "", ""


def reason(row: dict[str, Any]) -> str:
    if row["result"] == "wrong":
        return "**another text**"
    if row["result"] == "not_built":
        return "transformers does not run a tiny model of it here"
    if kind := KIND.search(row["reason"]):
        return f"`{kind[1]}` layers keep {kind[2]}"
    return next((short for start, short in REFUSALS.items() if start in row["reason"]), row["reason"][:80])
