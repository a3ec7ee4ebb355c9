"""The table of the page on quantised models."""

from typing import Any

Result = dict[str, Any]


def quantize(result: Result) -> str:
    """Perplexity, and the share of greedy choices that are those of fp32 and bf16."""
    lines = ["| weights | perplexity | choices equal to fp32's | to bf16's | MiB |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        name = row["weights"] + (f", groups of {row['group']}" if "group" in row else "")
        shares = [f"{row[of]:.1%}".replace("%", " %") if of in row else "" for of in ("equal_fp32", "equal_bf16")]
        size = f"{row['bytes'] / 2**20:.0f}" if "bytes" in row else ""
        lines.append(f"| {name} | {row['perplexity']:.2f} | {' | '.join(shares)} | {size} |")
    return "\n".join(lines)
