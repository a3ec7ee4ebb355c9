"""How text and figures look in a terminal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from redrafter.cli.console import Console
from redrafter.cli.progress import waiting

if TYPE_CHECKING:
    from redrafter.engine import Engine
    from redrafter.engine.request import Part, Stats

DRAFTED = "green"


def coloured(part: "Part", tokenizer: Any) -> Text:
    """The text of a step, with the drafted tokens in colour."""
    drafted = tokenizer.decode(part.tokens[: part.accepted], skip_special_tokens=True) if part.accepted else ""
    if not part.text.startswith(drafted):  # text held back from an earlier step shifts the boundary: colour by length
        drafted = part.text[: len(drafted)]
    return Text.assemble((drafted, DRAFTED), part.text[len(drafted) :])


def awaited(parts: Iterator["Part"], engine: "Engine", console: Console) -> Iterator["Part"]:
    """The same parts, with a status line while the first one is computed: the first use of a GPU takes a while."""
    compiles = engine.recorded and engine.runtime != "graphs"
    why = "reading the prompt; the first use compiles for a minute or two (--runtime graphs: seconds, a little slower)"
    with waiting(console, why if compiles else "reading the prompt"):
        first = next(parts, None)
    if first is not None:
        yield first
        yield from parts


def figures(stats: "Stats") -> str:
    if not stats.steps:
        return "one token, from the prompt's own pass"
    plain = f" ({stats.plain_steps} plain)" if 0 < stats.plain_steps < stats.steps else ""
    line = (
        f"{stats.tokens} tokens in {stats.steps} steps{plain}, {stats.tokens_per_step:.2f} tokens/step, "
        f"{stats.tokens_per_second:.1f} tokens/s"
    )
    if not stats.lossless:
        return f"{line}, LOSSY rule {stats.rule}"
    return line if stats.exactness is None else f"{line}, exactness {stats.exactness}"
