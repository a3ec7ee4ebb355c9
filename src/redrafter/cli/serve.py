"""`redrafter serve`: an OpenAI-compatible API for the model, and a page that shows the drafter at work."""

import argparse
import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, get_type_hints

from redrafter.bounds import Bounds, Seconds
from redrafter.cli.console import Console
from redrafter.cli.fields import add_fields, add_value, field_help, from_fields
from redrafter.cli.options import add_model, find_drafter, load_engine
from redrafter.cli.progress import stages, waiting
from redrafter.errors import ConfigError, OutOfMemory
from redrafter.serve.config import GuardConfig, HostName, ServeConfig

if TYPE_CHECKING:
    from redrafter.engine import Engine

EPILOG = """examples:
  redrafter serve
  redrafter serve --model my-model --drafter my-drafter --rows 16 --port 9000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"model": "SmolLM2-135M-Instruct", "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}'
Without a temperature, requests are sampled at 1, as by OpenAI.
The page is at http://127.0.0.1:8000/. What steps cost is learned while they are recorded at the start, and while the
server answers."""

Port = Annotated[int, Bounds(least=0, most=65535)]


def add(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to bind to (default: this machine only)")
    add_value(server, "--port", Port, default=8000, help="port (default 8000; 0: any free port)")
    server.add_argument(
        "--api-key",
        default=os.environ.get("REDRAFTER_API_KEY"),
        help="key that clients must send as a bearer token (default: $REDRAFTER_API_KEY, else no key is required)",
    )
    add_value(
        server, "--grace", Seconds, default=30.0, help="seconds that running answers get at shutdown (default 30)"
    )
    add_fields(server, ServeConfig)
    context = get_type_hints(ServeConfig, include_extras=True)["context"]
    default = argparse.SUPPRESS
    add_value(server, "--max-model-len", context, dest="context", default=default, help="the same as --context")
    add_fields(server, GuardConfig, ("body_bytes",))
    help_ = field_help(GuardConfig)
    add_value(server, "--allow-host", HostName, action="append", default=[], help=help_["hosts"])
    server.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help=help_["cors"])
    server.add_argument(
        "--request-log",
        choices=("json", "off"),
        default="json",
        help="one line of JSON on standard error for each request, with its id (default json)",
    )
    add_model(parser)


def run(args: argparse.Namespace) -> None:
    config = from_fields(args, ServeConfig)
    guard = GuardConfig(
        api_key=args.api_key,
        body_bytes=args.body_bytes,
        hosts=accepted_hosts(args.host, args.api_key, args.allow_host),
        cors=tuple(args.cors),
        logs=args.request_log == "json",
    )
    port = free_port(args.host, args.port)
    find_drafter(args.drafter)
    from redrafter import without_collection

    try:
        with without_collection():
            from redrafter.serve.server import Server, build_planned
            from redrafter.tuning.at_rest import warm_up
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing: pip install fastapi uvicorn") from error

    console = Console()
    if args.api_key is None and not is_loopback(args.host):
        warning = f"warning: everybody who reaches {args.host}:{port} can use the model; --api-key asks for a key"
        Console(stderr=True).print(warning, style="yellow", soft_wrap=True)
    with waiting(console, "loading"):
        engine = load_engine(args)
        if engine.target.tokenizer is None:
            raise ConfigError(f"{engine.target.name} has no tokenizer, and clients send text")
    with enough_room():
        served = build_planned(engine, config)
        scheduler = served.scheduler
        if scheduler.batch.recorded:
            with stages(console) as report:
                chunk = config.chunk_for(engine.target.device.type)
                warm_up(scheduler.batch, scheduler.policy, progress=report, chunk=chunk)
    batch = served.scheduler.batch
    where = f"http://{args.host}:{port}"

    def ready() -> None:
        promised = f", exactness {served.promise.exactness}" if served.promise.exactness else ""
        console.print(
            f"{served.name}: {batch.rows} rows of {batch.context} tokens, drafter {describe(engine)}{promised}"
        )
        console.print(f"page {where}/   API {where}/v1   Ctrl-C stops the server", soft_wrap=True)

    Server(served, guard, args.host, port, args.grace, ready).run()


@contextlib.contextmanager
def enough_room() -> Iterator[None]:
    """Report a lack of memory for the KV caches and the CUDA graphs of all rows in one line."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory("the KV caches do not fit into memory: use fewer --rows or a smaller --context") from error


def describe(engine: "Engine") -> str:
    return str(getattr(engine.drafter, "name", type(engine.drafter).__name__))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("::")
    (True, True, False, False)
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def accepted_hosts(host: str, key: str | None, allowed: list[str]) -> tuple[str, ...] | None:
    """Names of the server besides those of loopback; None: any name is accepted.

    >>> accepted_hosts("127.0.0.1", None, []), accepted_hosts("127.0.0.1", "key", [])
    (('127.0.0.1',), None)
    >>> accepted_hosts("0.0.0.0", None, []), accepted_hosts("0.0.0.0", None, ["box"])
    (None, ('0.0.0.0', 'box'))
    """
    checks = bool(allowed) or (key is None and is_loopback(host))
    return (host, *allowed) if checks else None


def free_port(host: str, port: int) -> int:
    """Bind to the port for a moment, so that a port that cannot be used is refused before a model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            return int(trial.getsockname()[1])
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be encoded
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another --host or --port") from error
