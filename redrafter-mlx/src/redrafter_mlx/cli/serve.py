"""`redrafter-mlx serve`: OpenAI's chat and completions endpoints, one request at a time."""

import argparse

from redrafter_mlx.cli.options import add_model, check, open_engine
from redrafter_mlx.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)


def run(args: argparse.Namespace) -> None:
    if not 0 <= args.port < 65536:
        raise ConfigError(f"a port is between 0 and 65535, got {args.port}")
    check(args)
    from redrafter_mlx.server import make_server

    server = make_server(args.host, args.port)
    server.engine = open_engine(args)
    port = server.server_address[1]
    print(f"redrafter-mlx serves {server.engine.target.name} on http://{args.host}:{port}/v1", flush=True)
    with server:
        server.serve_forever()
