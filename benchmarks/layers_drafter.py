"""Make a draft model of the target's first layers and distil it on texts that the target wrote.

    redrafter distill --out texts                     # or the data of a `redrafter train` run
    python benchmarks/layers_drafter.py --data texts --layers 4 --out my-draft-model
    redrafter generate --drafter my-draft-model --gamma confidence "Why is the sky blue?"

The folder is a normal transformers model with the target's tokenizer, in bf16.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/layers_drafter.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.common import bare_arguments, parse
from benchmarks.smoke import TinyFiles
from benchmarks.training.layer_drafter import distill, shorten
from redrafter.results import check_new
from redrafter.targets import load_target
from redrafter.train.dataset import read_texts


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--model", tiny.model, "--device", "cpu", "--data", tiny.texts, "--out", tiny.new_folder()]
    return [*words, "--layers", 1, "--updates", 2, "--batch", 2, "--longest", 24]


def main(argv: Sequence[str] | None = None) -> None:
    parser = bare_arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of texts made by `redrafter distill`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft model")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--layers", type=int, default=4, help="number of target layers to copy")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="texts per update")
    parser.add_argument("--longest", type=int, default=384, help="truncate texts to this many tokens")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, help="limit the number of updates to what fits into this time")
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser, argv, smoke)
    args.out.mkdir(parents=True, exist_ok=True)
    check_new(args.out / "config.json")
    target = load_target(args.model, dtype="fp32", device=args.device)
    texts = read_texts(args.data, target)
    model = shorten(target, args.layers)
    options = {"batch_size": args.batch, "longest": args.longest, "lr": args.lr, "seed": args.seed}
    updates = args.updates
    if args.minutes:
        for count in (3, 6):  # the first run warms up
            began = time.perf_counter()
            distill(shorten(target, args.layers), target, texts, updates=count, **options)
        updates = max(1, min(updates, int(6 * args.minutes * 60 / (time.perf_counter() - began))))
    reported: list[tuple[float, float]] = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("updates", total=updates)

        def report(update: int, loss: float, same: float) -> None:
            reported.append((loss, same))
            bar.update(task, completed=update)
            if update % max(1, updates // 20) == 0:
                last = reported[-max(1, updates // 20) :]
                loss, same = (sum(x) / len(last) for x in zip(*last, strict=True))
                bar.console.print(f"update {update}: loss {loss:.3f}, top-1 agreement with the target {same:.1%}")

        distill(model, target, texts, updates=updates, report=report, **options)
    model.to(torch.bfloat16).save_pretrained(args.out)
    target.tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
