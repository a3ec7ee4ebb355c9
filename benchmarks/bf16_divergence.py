"""How often bf16 texts part: speculative from plain, against plain from plain at another batch size.

Rounding differs between passes of different shape, so even two plain runs part now and then. The
reference is plain decoding in batches of 16; each contender's texts are compared with it up to the
first difference, and differences are counted per token compared.
"""

from rich.progress import track

from common import arguments, first_turns
from redrafter import Engine, Shape, load
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter
from redrafter.engine.ties import first_difference
from redrafter.results import check_new, write_results


def main() -> None:
    parser = arguments(__doc__ or "", "bf16_divergence.json")
    parser.add_argument("--model", help="a model folder (default: the embedded one)")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    target = load(args.model, drafter=None, dtype="bf16", device=args.device).target
    own = ModelDrafter(target, target)
    contenders = {
        "plain, batch 5": (Engine(target, NoDrafter()), 5),
        "plain, batch 1": (Engine(target, NoDrafter()), 1),
        "ngram, batch 16": (Engine(target, NgramDrafter(), shape=Shape(width=3, length=5, nodes=15)), 16),
        "self, batch 16": (Engine(target, own, shape=Shape(width=4, length=4, nodes=15)), 16),
    }
    prompts = first_turns(args.questions, args.prompts)
    rows = []
    for temperature, seed in ((0.0, 1), (1.0, 1)):
        reference_engine = Engine(target, NoDrafter())
        requests = reference_engine.requests(
            prompts, max_new_tokens=args.tokens, seed=seed, temperature=temperature, ignore_eos=True
        )

        def texts(engine: Engine, batch: int, label: str, requests: list = requests) -> list[list[int]]:
            starts = track(range(0, len(requests), batch), label)
            return [c.tokens for i in starts for c in engine.complete(requests[i : i + batch])]

        reference = texts(reference_engine, 16, f"T={temperature}: plain, batch 16")
        for name, (engine, batch) in contenders.items():
            got = texts(engine, batch, f"T={temperature}: {name}")
            firsts = [first_difference(a, b) for a, b in zip(reference, got, strict=True)]
            compared = sum(len(a) if i is None else i + 1 for a, i in zip(reference, firsts, strict=True))
            parted = sum(i is not None for i in firsts)
            rows.append(
                {
                    "temperature": temperature,
                    "seed": seed,
                    "contender": name,
                    "texts": len(firsts),
                    "parted": parted,
                    "compared": compared,
                    "per_1000_tokens": 1000 * parted / compared,
                }
            )
            print(rows[-1], flush=True)

    def rate(plain: bool) -> float:
        """Differences per 1000 tokens compared, over both temperatures."""
        chosen = [r for r in rows if r["contender"].startswith("plain") == plain]
        return 1000 * sum(r["parted"] for r in chosen) / sum(r["compared"] for r in chosen)

    headline = {"plain_per_1000_tokens": rate(True), "speculative_per_1000_tokens": rate(False)}
    write_results(args.save, headline, rows)
    print(headline)


if __name__ == "__main__":
    main()
