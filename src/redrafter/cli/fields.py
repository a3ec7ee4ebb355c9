"""Arguments of the command line made from annotations: a flag reads what its annotation allows, and refuses the rest.

Help texts are the docstrings of the fields that the arguments fill.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from redrafter.bounds import kinds, shown, wrong
from redrafter.cli.paths import read_path
from redrafter.errors import ConfigError

METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}


def add_value(group: Any, flag: str, annotation: Any, **more: Any) -> None:
    """An argument that takes a value, or several of them if the annotation is a tuple."""
    kind = kinds(annotation)[0]
    if get_origin(kind) is tuple:
        annotation, more = get_args(kind)[0], {"nargs": "+"} | more
    more = {"metavar": METAVARS.get(kinds(annotation)[0], "NAME")} | more
    group.add_argument(flag, type=functools.partial(read_value, flag, annotation), **more)


def read_value(flag: str, annotation: Any, text: str) -> Any:
    """The text as a value of the annotation."""
    kind, value = kinds(annotation)[0], text
    if kind is Path:
        return read_path(flag, text, get_args(annotation)[1:])
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{flag} {wrong(text, annotation)}, got {shown(text)}") from None
    if problem := wrong(value, annotation):
        raise ConfigError(f"{flag} {problem}, got {shown(value)}")
    return value


def add_fields(group: Any, cls: Any, names: Iterable[str] | None = None, without: Collection[str] = ()) -> None:
    """Fields of a dataclass as arguments: those that are named, or all of them."""
    help_, hints, every = field_help(cls), get_type_hints(cls, include_extras=True), cls.__dataclass_fields__
    for name in names or every:
        if name in without:
            continue
        default, flag = every[name].default, "--" + name.replace("_", "-")
        text = help_[name] + default_text(help_[name], default)
        if kinds(hints[name])[0] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            add_value(group, flag, hints[name], default=default, help=text)


def default_text(text: str, default: Any) -> str:
    """What the help adds about the default, unless the text tells it.

    >>> default_text("Texts.", (0.0, 1.0))
    ' (default 0 1)'
    """
    if default in (None, "", ()) or "(default" in text:
        return ""
    values = default if isinstance(default, tuple) else (default,)
    return f" (default {' '.join(f'{v:g}' if isinstance(default, tuple) else str(v) for v in values)})"


def from_fields(args: argparse.Namespace, cls: Any, **given: Any) -> Any:
    """The dataclass that the arguments fill; `given` are fields that have no argument."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in given]
    return cls(**{name: getattr(args, name) for name in names} | given)


def field_help(cls: type) -> dict[str, str]:
    """The docstring below each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found
