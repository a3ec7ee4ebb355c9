"""`redrafter chat`: a conversation in the terminal."""

import argparse
import io
import sys

from rich.text import Text

from redrafter.bounds import wrong
from redrafter.cli.console import Console
from redrafter.cli.fields import add_value
from redrafter.cli.options import add_model, add_sampling, load_engine, sampling_options
from redrafter.cli.progress import waiting
from redrafter.cli.show import awaited, coloured, figures
from redrafter.errors import PromptTooLong

EPILOG = "An empty line or Ctrl-D ends the conversation; Ctrl-C stops an answer."


def add(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--system", str, metavar="TEXT", help="the system message")
    add_model(parser)
    add_sampling(parser, max_new_tokens=512)


def run(args: argparse.Namespace) -> None:
    console = Console(soft_wrap=True)
    options = sampling_options(args)
    with waiting(console, "loading"):
        engine = load_engine(args)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line with a wrong byte is refused, not all that follow
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            turn = console.input(Text("you: ", style="bold")).strip()
        except EOFError:
            return
        if not turn:
            return
        if wrong(turn, str):
            console.print(f"the line is not {sys.stdin.encoding} text and is left out", style="yellow")
            continue
        messages.append({"role": "user", "content": turn})
        answer, part = "", None
        try:
            for part in awaited(engine.stream([messages], **options), engine, console):
                answer += part.text
                console.print(coloured(part, engine.target.tokenizer), end="")
        except KeyboardInterrupt:
            pass  # keep the answer so far
        except PromptTooLong as error:
            messages.pop()
            console.print(f"{error}, or start a new conversation", style="yellow")
            continue
        console.print()
        if part is not None:
            console.note(f"{figures(part.stats)}")
        messages.append({"role": "assistant", "content": answer})
