"""`redrafter bench sampling`: the tables of Wagner et al. (2024), with our verification next to theirs."""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from redrafter.bounds import Count, Positive
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import find_drafter
from redrafter.cli.paths import OutputFile
from redrafter.cli.progress import progress_bar, waiting
from redrafter.errors import ConfigError
from redrafter.results import check_new, write_results

EPILOG = """examples:
  redrafter bench sampling summaries --data benchmarks/data/cnn_dm.jsonl --drafter my-draft-model
  redrafter bench sampling speech --data benchmarks/data/audio --drafter my-speech-drafter --save speech_sampling.json

Methods: baseline (the function of transformers, batched for several rows), paper_exact and sigmoid_lossy (the paper's;
sigmoid_lossy is LOSSY: its texts are not the target's), fused (ours, lossless). All methods decode the same prompts
with the same drafter, in turns. Tables 1, 5, 6: gamma by the paper's heuristic; 8: by gamma; 2, 7: the sigmoid's
constants. --save rewrites the file after each table.

ROUGE and WER depend on the sampled texts: ± is their standard error over all texts. With --samples, several texts of
one prompt count separately."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["summaries", "speech"], help="summarise articles, or transcribe clips")
    add_value(parser, "--data", Path, required=True, help="articles (JSON lines), or a folder of clips")
    parser.add_argument("--drafter", default="auto", help="as for the other commands; speech needs a folder")
    parser.add_argument("--model", help="the target (default: SmolLM2-135M-Instruct, or Whisper tiny.en)")
    add_value(parser, "--texts", Count, default=80, help="maximum number of texts in tables 1, 5, 6 (default 80)")
    add_value(parser, "--samples", Count, default=1, help="texts for each prompt in tables 1, 5, 6 (default 1)")
    add_value(parser, "--fewer", Count, default=8, help="maximum number of texts in the other tables (default 8)")
    add_value(parser, "--batch", Count, default=1, help="summaries written at once (default 1, as in the paper)")
    help_ = "maximum length of a summary (default 96)"
    add_value(parser, "--max-new-tokens", Count, default=96, metavar="M", help=help_)
    add_value(parser, "--temperature", Positive, default=1.0, help="above 0 (default 1)")
    add_value(parser, "--seed", int, default=0, help="of the sampled texts (default 0)")
    parser.add_argument("--dtype", default="auto", help="fp32, bf16, fp16 or fp64 (default: bf16 on a GPU, else fp32)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add_value(parser, "--save", OutputFile, help="write the figures as JSON")
    parser.add_argument("--overwrite", action="store_true", help="let --save replace a file")


def run(args: argparse.Namespace) -> None:
    if args.save:
        check_new(args.save, args.overwrite)
    if args.task == "speech" and args.batch != 1:
        raise ConfigError(f"clips are transcribed one by one: --batch must be 1, got {args.batch}")
    find_drafter(args.drafter)
    from redrafter.bench import sampling

    console = Console()
    with waiting(console, "loading"):
        task = load(args)
    todo = sampling.tables(task, args.texts // args.batch or 1, args.fewer // args.batch or 1, args.samples)
    about = {"task": args.task, "batch": args.batch, "temperature": args.temperature, "drafter": name_of(args.drafter)}
    rows: list[dict[str, Any]] = []
    with progress_bar(Console(stderr=True), transient=True) as bar:
        whole = bar.add_task("texts", total=sum(sampling.total(task, part) for part in todo))
        for part in todo:
            for found in sampling.measure(task, part, args.seed):
                if found is None:
                    bar.advance(whole)
                    continue
                rows += [about | row for row in found]
                bar.console.print(table(found, task.metric))
                if args.save:
                    write_results(args.save, sampling.headline(rows, task.metric), rows)
    if args.save:
        console.note(f"written to {args.save}")


def load(args: argparse.Namespace) -> Any:
    from redrafter.bench import tasks

    where = {"model": args.model, "dtype": args.dtype, "device": args.device, "temperature": args.temperature}
    if args.task == "speech":
        return tasks.Speech(args.data, args.drafter, **where)
    return tasks.Summaries(args.data, args.drafter, tokens=args.max_new_tokens, batch=args.batch, **where)


def name_of(drafter: str) -> str:
    """A folder's name alone: results name no machine's paths."""
    return Path(drafter).name


def table(rows: list[dict[str, Any]], metric: str) -> Table:
    first = rows[0]
    title = f"table {first['table']}: gamma {first['gamma']}"
    title += f", alpha, beta ∓{first['scale']:.0e}" if "scale" in first else ""
    made = Table(title=f"{title}, {first['texts']} texts")
    for name in ("way", metric, "accepted", "µs a call", "profiling less", "wall clock less", "GB/s", "peak GB"):
        made.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        peak = row["peak_memory_bytes"]
        made.add_row(
            row["way"],
            f"{row[metric]:.3f}" + (f" ± {row[f'{metric}_error']:.3f}" if row[f"{metric}_error"] is not None else ""),
            f"{row['acceptance']:.1%}",
            f"{row['call_microseconds']:.0f} ± {row['call_deviation']:.0f}",
            f"{row['profiling_reduction']:.1%}",
            f"{row['wall_reduction']:.1%}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{peak / 1e9:.2f}" if peak else "",
        )
    return made
