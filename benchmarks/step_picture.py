"""The README's picture: one real step of the default model, its tree, its mask and what was kept, as docs/step.svg.

    python benchmarks/step_picture.py

The model answers a question with the drafter that comes with the package. The first step that keeps at least three
guesses and drops as many is drawn; if none does, the one that keeps most.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/step_picture.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import redrafter
from benchmarks.common import bare_arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter import Engine, Shape
from redrafter.runtime.batch import Batch

QUESTION = "Fix the spelling and give me back the whole text: The lighthous stood on the clif for a hundrd years."
TELLING = 3
"""So many guesses are kept and so many dropped in a step that shows both."""
COLUMN, LINE, BOX, EDGE, CELL = 112, 34, 24, 24, 20
"""Pixels: between depths, between branches, height of a box, margin, side of a cell of the mask."""
KEPT, DROPPED, TARGET, INK = "#0b7a4b", "#8a8f98", "#1d5fbf", "#1c1f24"


@dataclass(frozen=True)
class Step:
    """One verified tree, its root first, and what came of it."""

    before: str  # the text up to the root
    tokens: list[str]
    parents: list[int]  # the root's is 0
    path: list[int]  # kept nodes, root first
    chosen: str  # the target's own token after the path

    @property
    def dropped(self) -> int:
        return len(self.tokens) - len(self.path)

    @property
    def telling(self) -> bool:
        return len(self.path) > TELLING <= self.dropped

    def ancestors(self, node: int) -> set[int]:
        """What a node may see of the tree: itself and its ancestors."""
        seen = {node}
        while node:
            node = self.parents[node]
            seen.add(node)
        return seen

    @property
    def depths(self) -> list[int]:
        return [len(self.ancestors(node)) - 1 for node in range(len(self.tokens))]


def steps(engine: Engine, question: str, shape: Shape, most: int) -> Iterator[Step]:
    """The steps of an answer in which something was drafted."""
    (request,) = engine.requests([[{"role": "user", "content": question}]], max_new_tokens=most)
    context = len(request.prompt) + most + shape.budget + 2
    endings = max(1, len(request.eos))
    batch = Batch(
        engine.target, engine.drafter, rows=1, context=context, shapes=[shape], rules=engine.make_rule, endings=endings
    )
    text_of: Callable[[list[int]], str] = engine.target.tokenizer.decode
    row = batch.open(request)
    batch.read_all([row])
    done = False
    while not done:
        before = text_of(row.ids[len(request.prompt) : -1])
        ((_, output),) = batch.step(shape)[0].rows
        done = output.done
        if output.tree is not None and len(output.tree[0]) > 1 and not done:
            tokens, parents, path = output.tree
            words = [text_of([token]) for token in tokens]
            yield Step(before, words, parents, path, text_of(output.tokens[-1:]))


def choose(found: Iterator[Step]) -> Step:
    best: Step | None = None
    for step in found:
        if best is None or len(step.path) > len(best.path):
            best = step
        if step.telling:
            return step
    assert best is not None, "no step drafted anything"
    return best


def places(step: Step) -> list[int]:
    """The line of each node: a chain stays on its line, each further child opens a new one below."""
    lines = [0] * len(step.tokens)
    children: dict[int, list[int]] = {}
    for node, parent in list(enumerate(step.parents))[1:]:
        children.setdefault(parent, []).append(node)
    kept, free = set(step.path), 0

    def place(node: int, line: int) -> None:
        nonlocal free
        lines[node] = line
        for i, child in enumerate(sorted(children.get(node, []), key=lambda c: c not in kept)):
            if i:
                free += 1
            place(child, line if i == 0 else free)

    place(0, 0)
    return lines


def shown(word: str, most: int = 11) -> str:
    """A token as it is drawn: a dot for a space, an arrow for a new line, a square for what cannot be shown."""
    word = word.replace(" ", "·").replace("\n", "↵")
    word = "".join(letter if letter.isprintable() else "□" for letter in word) or "∅"
    return word if len(word) <= most else word[: most - 1] + "…"


def text(x: float, y: float, words: str, colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{more}>{escape(words)}</text>'


def box(x: float, y: float, words: str, colour: str, *, filled: bool, dashed: bool = False) -> str:
    fill, ink = (colour, "#fff") if filled else ("#fff", colour)
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    wide = COLUMN - 20
    frame = f'<rect x="{x}" y="{y}" width="{wide}" height="{BOX}" rx="5" fill="{fill}" stroke="{colour}"{dashes}/>'
    return frame + text(x + wide / 2, y + 16, shown(words), ink, ' text-anchor="middle"')


def drawn(step: Step) -> str:
    """The tree on the left, the mask on the right, and below them what the step gave."""
    kept, lines, depths = set(step.path), places(step), step.depths
    top = EDGE + 58
    at = [(EDGE + depth * COLUMN, top + line * LINE) for depth, line in zip(depths, lines, strict=True)]
    end = at[step.path[-1]]
    after = (end[0] + COLUMN, end[1])
    left = max(x for x, _ in [*at, after]) + COLUMN + 90
    count = len(step.tokens)
    wide = left + count * CELL + EDGE
    high = top + max((max(lines) + 1) * LINE, count * CELL) + 76
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="13" '
        'role="img">',
        f"<title>{escape(summary(step))}</title>",
        f'<rect width="{wide}" height="{high}" fill="#fff"/>',
        text(EDGE, EDGE + 4, f"The text so far ends with “{shown((step.before + step.tokens[0])[-60:], 60)}”."),
        text(EDGE, EDGE + 34, "the tree of guesses", more=' font-weight="bold"'),
        text(left, EDGE + 34, "its mask: what each token sees", more=' font-weight="bold"'),
    ]
    links = [(at[parent], at[node], node in kept) for node, parent in enumerate(step.parents) if node]
    links.append((end, after, True))
    for (x0, y0), (x1, y1), solid in links:
        x0, y0, y1 = x0 + COLUMN - 20, y0 + BOX // 2, y1 + BOX // 2
        parts.append(
            f'<path d="M{x0} {y0}C{x0 + 12} {y0} {x1 - 12} {y1} {x1} {y1}" fill="none" '
            f'stroke="{KEPT if solid else DROPPED}" stroke-width="{2 if solid else 1}"/>'
        )
    for node, (x, y) in enumerate(at):
        colour = (KEPT if node in kept else DROPPED) if node else INK
        parts.append(box(x, y, step.tokens[node], colour, filled=node in kept))
    parts.append(box(*after, step.chosen, TARGET, filled=False, dashed=True))
    for node in range(count):
        y = top + node * CELL
        colour = (KEPT if node in kept else DROPPED) if node else INK
        parts.append(text(left - 6, y + 14, shown(step.tokens[node]), colour, ' text-anchor="end" font-size="11"'))
        for other in range(count):
            fill = colour if other in step.ancestors(node) else "#eef0f3"
            parts.append(
                f'<rect x="{left + other * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{fill}"/>'
            )
    parts += [text(EDGE, high - EDGE - 14 + 20 * i, line) for i, line in enumerate(summary(step).splitlines())]
    return "\n".join([*parts, "</svg>"]) + "\n"


def summary(step: Step) -> str:
    right = len(step.path) - 1
    return (
        f"One pass of the model checks {len(step.tokens) - 1} guesses behind the last token (black). It keeps the "
        f"{right} that it would have written itself (green), drops {step.dropped},\n"
        f"and adds its own next token (dashed): {right + 1} new tokens in one pass."
    )


def smoke(tiny: TinyFiles) -> list[object]:
    out = tiny.new_folder() / "step.svg"
    return ["--model", tiny.model, "--drafter", tiny.drafter, "--shape", "2x3:4", "--tokens", 8, "--out", out]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", default="recurrent")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--shape", type=Shape.of, default=Shape.of("4x5:10"), metavar="WxL:N")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "step.svg")
    args = parse(parser, argv, smoke)
    with redrafter.load(args.model, drafter=args.drafter, device="cpu", shape=args.shape) as engine:
        step = choose(steps(engine, args.question, args.shape, args.tokens))
    args.out.write_text(drawn(step))
    print(summary(step))


if __name__ == "__main__":
    main()
