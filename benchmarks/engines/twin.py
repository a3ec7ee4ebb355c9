"""Write the default model and its drafter, widened to a larger model's shape, as folders that other engines load.

    python benchmarks/engines/twin.py --model SMALL --out FOLDER

FOLDER/model is an ordinary Llama checkpoint in bf16, FOLDER/drafter the widened drafter.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import argparse
import shutil

from benchmarks.widen import widen, widen_recurrent
from benchmarks.widen.load import shape_named
from redrafter.drafters import RecurrentDrafter, checkpoint, shipped
from redrafter.errors import DrafterMismatch
from redrafter.targets import Target, load_target
from redrafter.targets.load import parse_dtype


def write_twin(
    out: Path, shape: str, device: str, budget: str | int, model: str | None, drafter: Path | None, dtype: str = "bf16"
) -> None:
    """Write the twin's folders, or leave them if they are there."""
    if (out / "drafter").exists():
        return
    small = load_target(model, dtype="fp32", device="cpu")
    folder = drafter or shipped.find(small)
    if folder is None:
        raise DrafterMismatch(f"no drafter comes with the package for {small.name}: give the folder of one")
    own = RecurrentDrafter(checkpoint.read_for(folder, small), small)  # type: ignore[arg-type]
    wide = Target(widen(small.model, shape_named(shape), dtype=parse_dtype(dtype, device), device=device))
    wide.tokenizer = small.tokenizer
    for made in ("part", "model"):
        shutil.rmtree(out / made, ignore_errors=True)
    wide.model.save_pretrained(out / "part")
    small.tokenizer.save_pretrained(out / "part")
    (out / "part").rename(out / "model")
    widen_recurrent(own, wide, budget).save(out / "drafter", wide)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--shape", default="vicuna-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", default="100M")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    write_twin(given.out, given.shape, given.device, given.budget, given.model, given.drafter)
