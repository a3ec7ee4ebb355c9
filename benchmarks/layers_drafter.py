"""Make a draft model out of the target's first layers, distilled on texts that the target wrote.

    redrafter distill --out texts                     # or the data of a `redrafter train` run
    python benchmarks/layers_drafter.py --data texts --layers 4 --out my-draft-model
    redrafter generate --drafter my-draft-model --gamma confidence "Why is the sky blue?"

The folder is a normal transformers model with the target's tokenizer, in bf16.
"""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from redrafter.results import check_new
from redrafter.targets import load_target
from redrafter.train.dataset import read_texts
from redrafter.train.layer_drafter import distill, shorten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of texts that `redrafter distill` made")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft model")
    parser.add_argument("--model", help="the target (default: the embedded one)")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--layers", type=int, default=4, help="how many of the target's layers it begins with")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="texts an update learns from")
    parser.add_argument("--longest", type=int, default=384, help="tokens of a text, the rest is left out")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--minutes", type=float, help="fewer updates, if this is the time there is")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    check_new(args.out / "config.json")
    target = load_target(args.model, dtype="fp32", device=args.device)
    texts = read_texts(args.data, target)
    model = shorten(target, args.layers)
    options = {"batch_size": args.batch, "longest": args.longest, "lr": args.lr, "seed": args.seed}
    updates = args.updates
    if args.minutes:
        for count in (3, 6):  # the first ones load libraries
            began = time.perf_counter()
            distill(shorten(target, args.layers), target, texts, updates=count, **options)
        updates = max(1, min(updates, int(6 * args.minutes * 60 / (time.perf_counter() - began))))
    seen: list[tuple[float, float]] = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("updates", total=updates)

        def report(update: int, loss: float, same: float) -> None:
            seen.append((loss, same))
            bar.update(task, completed=update)
            if update % max(1, updates // 20) == 0:
                last = seen[-max(1, updates // 20) :]
                loss, same = (sum(x) / len(last) for x in zip(*last, strict=True))
                bar.console.print(f"update {update}: loss {loss:.3f}, the target's choice {same:.1%}")

        distill(model, target, texts, updates=updates, report=report, **options)
    model.to(torch.bfloat16).save_pretrained(args.out)
    target.tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
