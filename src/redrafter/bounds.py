"""What a value may be: its type and its bounds, read from annotations and checked in one place.

A dataclass says it in its fields, and calls `check(self)` when it is made. A function says it in its parameters, and is
`checked`. The command line uses `wrong`.

>>> wrong(0, Annotated[int, Bounds(least=1)])
'must be at least 1'
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from redrafter.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Of a number, or of the length of a text, tuple or mapping. Infinity is refused unless a bound names it."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def wrong(self, value: Any) -> str | None:
        """What the value must be instead; None if it is within."""
        if self.least is not None and value < self.least:
            return f"at least {self.least}"
        if self.above is not None and value <= self.above:
            return f"above {self.above}"
        if self.most is not None and value > self.most:
            return f"at most {self.most}"
        if self.below is not None and value >= self.below:
            return f"below {self.below}"
        return None


MOST_INTEGER = 2**63 - 1
"""Integers reach C++ and the GPU in 64 bits."""
Count = Annotated[int, Bounds(least=1, most=2**31 - 1)]
"""How many of something, at least one."""
CountOrZero = Annotated[int, Bounds(least=0, most=2**31 - 1)]
"""How many of something; 0 usually turns it off."""
Size = Annotated[int, Bounds(least=1, most=2**20)]
"""Of one axis of a network."""
Layer = Annotated[int, Bounds(least=-(2**16), most=2**16)]
"""A hidden state of the target; negative ones count from the last."""
Name = Annotated[str, Bounds(least=1)]
Bytes = Annotated[int, Bounds(least=0, most=2**50)]
Seconds = Annotated[float, Bounds(least=0, most=365 * 24 * 3600)]
"""At most a year: timers take no more."""
Positive = Annotated[float, Bounds(above=0)]
NotNegative = Annotated[float, Bounds(least=0)]
Probability = Annotated[float, Bounds(least=0, most=1)]

_TYPES = {
    bool: "true or false",
    tuple: "a tuple or a list",
    list: "a list",
    Sequence: "a list",
    dict: "a mapping",
    Mapping: "a mapping",
    Callable: "a function",
}


def check(config: Any, **names: str) -> None:
    """Raise ConfigError for the first field of a dataclass whose value its annotation does not allow.

    `names` are those of fields in messages, where they differ. Lists in fields that are tuples become tuples.
    """
    cls: Any = type(config)
    for name, annotation, default in _fields(cls):
        value = getattr(config, name)
        if value is default:  # saves the time of looking: rows without a request use default parameters in every step
            continue
        if isinstance(value, list) and tuple in (get_origin(kind) for kind in kinds(annotation)):
            value = tuple(value)
            object.__setattr__(config, name, value)
        check_value(names.get(name, name), value, annotation)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The same function. It raises ConfigError for an argument that its parameter's annotation does not allow."""
    signature = inspect.signature(function)
    hints: dict[str, Any] = {}  # read at the first call: annotations may name what is defined later

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if not hints:
            hints.update(get_type_hints(function, include_extras=True))
        for name, value in signature.bind(*args, **options).arguments.items():
            if name in hints and value is not signature.parameters[name].default:
                check_value(name, value, hints[name])
        return function(*args, **options)

    return call


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raise ConfigError if the annotation does not allow the value."""
    if problem := wrong(value, annotation):
        for key, item, kind in _items(value, annotation):
            check_value(f"{name}[{shown(key)}]", item, kind)
        raise ConfigError(f"{name} {problem}, got {shown(value)}")


def check_path(name: str, path: str | Path) -> None:
    """Raise ConfigError for a path that the file system refuses: it is too long, or in a folder nobody may read."""
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name} is no path that can be read ({reason}), got {shown(str(path))}") from None


def wrong(value: Any, annotation: Any, bounds: Bounds | None = None) -> str | None:
    """What the value must be instead, such as "must be at least 1"; None if the annotation allows it."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return wrong(value, inner[0], next((note for note in inner[1:] if isinstance(note, Bounds)), None))
    if origin in (Union, types.UnionType):
        problems = [wrong(value, kind) for kind in inner if kind is not types.NoneType or value is None]
        named = dict.fromkeys(problem for problem in problems if problem is not None)
        return None if None in problems else " or ".join(named).replace(" or must be ", " or ")
    if origin is Literal:
        known = any(type(value) is type(name) and value == name for name in inner)
        return None if known else f"must be one of {', '.join(map(str, inner))}"
    if annotation in (int, float):
        return _wrong_number(value, annotation, bounds or Bounds())
    if problem := _wrong_type(value, origin or annotation):
        return problem
    if bounds is not None and (problem := bounds.wrong(len(value))):
        return f"must have a length of {problem}"
    return next(filter(None, (wrong(item, kind) for _, item, kind in _items(value, annotation))), None)


def shown(value: Any) -> str:
    """A value in an error message: short, on one line.

    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…"
    """
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or a class of the user's
        return f"a value of type {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 64 else text[:63] + "…"


@functools.cache
def _fields(cls: Any) -> list[tuple[str, Any, Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(field.name, hints[field.name], field.default) for field in fields(cls)]


def kinds(annotation: Any) -> tuple[Any, ...]:
    """The annotation without its bounds, or those of a union.

    >>> kinds(Annotated[int, Bounds(least=1)] | None)
    (<class 'int'>, <class 'NoneType'>)
    """
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for inner in get_args(annotation) for kind in kinds(inner))
    return (annotation,)


def _items(value: Any, annotation: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What a list, a tuple or a mapping holds: where, what, and the item's annotation."""
    for kind in kinds(annotation):
        inner = get_args(kind)
        is_list = get_origin(kind) in (tuple, list, Sequence) and not _wrong_type(value, Sequence)
        if is_list and not (inner[0] is int and _are_integers(value)):
            yield from ((at, item, inner[0]) for at, item in enumerate(value))
        if get_origin(kind) in (dict, Mapping) and isinstance(value, Mapping):
            yield from ((key, key, inner[0]) for key in value)
            yield from ((key, item, inner[1]) for key, item in value.items())


def _are_integers(values: Sequence[Any]) -> bool:
    """Whether all are Python's own integers, of 64 bits: prompts have very many."""
    return not values or (set(map(type, values)) == {int} and max(abs(min(values)), abs(max(values))) <= MOST_INTEGER)


def _wrong_number(value: Any, kind: type, bounds: Bounds) -> str | None:
    """No bool is a number."""
    is_number: bool = isinstance(value, Integral if kind is int else Real)
    if isinstance(value, bool) or not is_number:
        return "must be a whole number" if kind is int else "must be a number"
    if value != value:  # NaN
        return "must be a number"
    value = value if kind is int else _as_float(value)  # numpy's small floats do not compare with large bounds
    if problem := bounds.wrong(value):
        return f"must be {problem}"
    if kind is int:
        problem = Bounds(least=-MOST_INTEGER - 1, most=MOST_INTEGER).wrong(value)
        return f"must be {problem}" if problem else None
    return None if math.isfinite(value) or value in (bounds.least, bounds.most) else "must be finite"


def _wrong_type(value: Any, kind: Any) -> str | None:
    if kind is str:
        if not isinstance(value, str):
            return "must be text"
        return None if _is_unicode(value) else "must be UTF-8 text"
    kind = type(None) if kind is None else kind
    if kind is Any or _is_open(kind):
        return None
    if isinstance(value, kind) and not (kind is Sequence and isinstance(value, str | bytes | bytearray | memoryview)):
        return None
    return f"must be {_TYPES.get(kind, f'of type {kind.__name__}')}"


def _is_open(kind: Any) -> bool:
    """Whether this is a protocol whose methods Python does not look for."""
    return getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_unicode(text: str) -> bool:
    """Python decodes bytes that are not UTF-8 to lone surrogates, which no file and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
