"""`redrafter chat`: a conversation in the terminal."""

import argparse

from rich.console import Console

from redrafter.cli.options import add_model, add_sampling, load_engine, sampling_options
from redrafter.cli.progress import waiting
from redrafter.cli.show import awaited, coloured, figures
from redrafter.errors import ConfigError, PromptTooLong

EPILOG = "An empty line or Ctrl-D ends the conversation; Ctrl-C stops an answer."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="the system message")
    add_model(parser)
    add_sampling(parser, max_new_tokens=512)


def run(args: argparse.Namespace) -> None:
    console = Console(highlight=False, soft_wrap=True)
    options = sampling_options(args)
    with waiting(console, "loading"):
        engine = load_engine(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            turn = console.input("[bold]you:[/bold] ").strip()
        except EOFError:
            return
        except UnicodeDecodeError:
            raise ConfigError("the line is not valid text; set PYTHONIOENCODING to the terminal's encoding") from None
        if not turn:
            return
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
            console.print(f"{error}, or start a new conversation", style="yellow", markup=False)
            continue
        console.print()
        if part is not None:
            console.print(f"[dim]{figures(part.stats)}[/dim]")
        messages.append({"role": "assistant", "content": answer})
