"""How often bf16 texts part: speculative from plain, against plain from plain at another batch size.

Rounding differs between passes of different shape, so even two plain runs part now and then. The
reference is plain decoding of all prompts as one batch; each contender's texts are compared with it
up to the first difference, and differences are counted per token compared.
"""

from rich.progress import track

from common import arguments, first_turns
from redrafter import Engine, Shape, load
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter
from redrafter.engine.ties import first_difference
from redrafter.results import check_new, write_results

SETTINGS = ((0.0, 1), (1.0, 1), (1.0, 2))
"""(temperature, seed)"""


def main() -> None:
    parser = arguments(__doc__ or "", "bf16_divergence.json")
    parser.add_argument("--model", help="a model folder (default: the embedded one)")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--plain", type=int, nargs="+", default=[20, 5], help="batch sizes of the other plain runs")
    args = parser.parse_args()
    check_new(args.save, args.overwrite)
    target = load(args.model, drafter=None, dtype="bf16", device=args.device).target
    plain = Engine(target, NoDrafter())
    ngram = Engine(target, NgramDrafter(), shape=Shape(width=3, length=5, nodes=15))
    own = Engine(target, ModelDrafter(target, target), shape=Shape(width=4, length=4, nodes=15))
    contenders = {
        f"ngram, batch {args.prompts}": (ngram, args.prompts),
        f"self, batch {args.prompts}": (own, args.prompts),
    } | {f"plain, batch {size}": (plain, size) for size in args.plain}
    prompts = first_turns(args.questions, args.prompts)
    rows: list[dict] = []
    for temperature, seed in SETTINGS:
        requests = plain.requests(
            prompts, max_new_tokens=args.tokens, seed=seed, temperature=temperature, ignore_eos=True
        )

        def texts(engine: Engine, batch: int, label: str, requests: list = requests) -> list[list[int]]:
            starts = track(range(0, len(requests), batch), label)
            return [c.tokens for i in starts for c in engine.complete(requests[i : i + batch])]

        reference = texts(plain, args.prompts, f"T={temperature}: plain, one batch")
        for name, (engine, batch) in contenders.items():
            got = texts(engine, batch, f"T={temperature}: {name}")
            firsts = [first_difference(a, b) for a, b in zip(reference, got, strict=True)]
            rows.append(
                {
                    "temperature": temperature,
                    "seed": seed,
                    "contender": name,
                    "texts": len(firsts),
                    "parted": sum(i is not None for i in firsts),
                    "compared": sum(len(a) if i is None else i + 1 for a, i in zip(reference, firsts, strict=True)),
                }
            )
            print(rows[-1], flush=True)
            write_results(args.save, headline(rows), rows)  # after each, so that an interrupted run leaves what it saw
    print(headline(rows))


def headline(rows: list[dict]) -> dict[str, float]:
    """Differences per 1000 tokens compared at temperature 0, which every contender runs first."""
    cold = [r for r in rows if r["temperature"] == 0]
    guessed = [r for r in cold if not r["contender"].startswith("plain")]
    rates = {"speculative_t0": 1000 * sum(r["parted"] for r in guessed) / sum(r["compared"] for r in guessed)}
    for r in cold:
        if r["contender"].startswith("plain"):
            size = r["contender"].split()[-1]
            rates[f"plain_batch_{size}_t0"] = 1000 * r["parted"] / r["compared"]
    return rates


if __name__ == "__main__":
    main()
