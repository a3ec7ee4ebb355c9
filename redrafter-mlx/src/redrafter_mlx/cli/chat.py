"""`redrafter-mlx chat`: a conversation whose earlier turns are read once."""

import argparse

from redrafter_mlx.cli.options import add_model, add_text, open_engine, text_options


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="a system message")
    add_model(parser)
    add_text(parser)


def run(args: argparse.Namespace) -> None:
    engine = open_engine(args)
    from redrafter_mlx.decode import PromptCache

    kept = PromptCache()
    messages = [{"role": "system", "content": args.system}] if args.system else []
    print("An empty line ends the conversation.")
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            said = ""
        if not said:
            return
        messages.append({"role": "user", "content": said})
        answer = ""
        for part in engine.stream(messages, prompt_cache=kept, **text_options(args)):
            print(part.text, end="", flush=True)
            answer += part.text
        print()
        messages.append({"role": "assistant", "content": answer})
