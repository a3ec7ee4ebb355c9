"""What users can set is checked in one place: its type, its bounds, and one line that names the field."""

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, Protocol, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from redrafter.bench.runs import RunConfig
from redrafter.bounds import (
    MOST_INTEGER,
    Bounds,
    Count,
    Positive,
    Probability,
    check_value,
    checked,
    kinds,
    shown,
    wrong,
)
from redrafter.config import Gamma, RuleConfig, SamplingParams, Shape
from redrafter.drafters.eagle.config import EagleConfig
from redrafter.drafters.medusa.config import MedusaConfig
from redrafter.drafters.options import DrafterOptions
from redrafter.drafters.recurrent.config import RecurrentConfig
from redrafter.errors import ConfigError
from redrafter.interop.sglang.settings import Settings
from redrafter.interop.vllm.target import ProposerConfig
from redrafter.serve.config import GuardConfig, ServeConfig
from redrafter.serve.scheduler import Limits
from redrafter.train.config import DistillConfig, TrainConfig

SIZES = {"vocab_size": 64, "context_size": 8, "embedding_size": 8, "exit_size": 8}
NEEDED: dict[type, dict[str, Any]] = {
    Shape: {},
    SamplingParams: {},
    RuleConfig: {},
    Gamma: {},
    ServeConfig: {},
    GuardConfig: {},
    Limits: {},
    TrainConfig: {},
    DistillConfig: {},
    DrafterOptions: {},
    RecurrentConfig: SIZES | {"state_size": 8},
    MedusaConfig: SIZES,
    EagleConfig: SIZES | {"heads": 1},
    Settings: {},
    ProposerConfig: {},
    RunConfig: {"suite": "x", "questions": "x", "model": {}, "contenders": ("a",)},
}
"""Every class that holds what a user set, with the values that it cannot do without."""
FIELDS = [(cls, field.name) for cls in NEEDED for field in fields(cls)]
ODD = [None, True, -1, 10**400, 10**5000, 0.5, math.nan, math.inf, -math.inf, "", "x\udcff", b"x", [], [[1]], {}]
ODD += [object(), {"x": 1}, {1: math.nan}, [math.nan], ["x"], np.float32("nan"), np.array([1, 2]), "9" * 9999]


class Unnamed(Protocol):
    """Python cannot tell whether an object has this."""

    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "annotation", "says"),
    [
        (1, Count, None),
        (np.int64(1), Count, None),
        (0, Count, "must be at least 1"),
        (10**400, Count, "must be at most 2147483647"),
        (True, Count, "must be a whole number"),
        (1.0, Count, "must be a whole number"),
        (None, Count, "must be a whole number"),
        (None, Count | None, None),
        ("1", Count | None, "must be a whole number"),
        (-MOST_INTEGER, int, None),
        (MOST_INTEGER + 1, int, f"must be at most {MOST_INTEGER}"),
        (1, Positive, None),
        (np.float32(0.5), Positive, None),
        (0, Positive, "must be above 0"),
        (math.nan, Positive, "must be a number"),
        (math.inf, Positive, "must be finite"),
        (10**400, float, "must be finite"),
        (-(10**400), Annotated[float, Bounds(least=0)], "must be at least 0"),
        (np.float16(1), Annotated[float, Bounds(most=1e30)], None),
        (-math.inf, Annotated[float, Bounds(least=-math.inf)], None),
        (math.inf, Annotated[float, Bounds(least=-math.inf)], "must be finite"),
        (1, Probability, None),
        (1.1, Probability, "must be at most 1"),
        (1, Annotated[float, Bounds(below=1)], "must be below 1"),
        ("b", Literal["a", "b"], None),
        ("c", Literal["a", 1], "must be one of a, 1"),
        (True, Literal["a", 1], "must be one of a, 1"),
        ("x", str, None),
        (b"x", str, "must be text"),
        ("x\udcff", str, "must be UTF-8 text"),
        ("", Annotated[str, Bounds(least=1)], "must have a length of at least 1"),
        (1, bool, "must be true or false"),
        ((1, 2), tuple[Count, ...], None),
        ((1, 0), tuple[Count, ...], "must be at least 1"),
        ("12", tuple[int, ...], "must be a tuple or a list"),
        ({1: 2.0}, dict[int, float], None),
        ({"1": 2.0}, dict[int, float], "must be a whole number"),
        ([1], dict[int, float], "must be a mapping"),
        (-(2**63), int, None),
        (-(2**63) - 1, int, f"must be at least {-(2**63)}"),
        ([1, 2], Sequence[int], None),
        ((1, np.int64(2)), Sequence[int], None),
        ([1, True], Sequence[int], "must be a whole number"),
        ([1, 10**19], Sequence[int], f"must be at most {MOST_INTEGER}"),
        ("12", Sequence[str], "must be a list"),
        (b"12", Sequence[int], "must be a list"),
        ("12", str | Sequence[str], None),
        (5, str | Sequence[str] | None, "must be text or a list"),
        ([5], str | Sequence[str] | None, "must be text"),
        (5, Shape | str | None, "must be of type Shape or text"),
        (0, Count | None, "must be at least 1"),
        (len, Callable[[str], int], None),
        (5, Callable[[str], int], "must be a function"),
        (5, Unnamed, None),
    ],
)
def test_a_value_is_checked_by_its_annotation(value, annotation, says):
    assert wrong(value, annotation) == says


def test_a_refusal_names_the_argument_and_what_was_given():
    with pytest.raises(ConfigError, match=r"^rows must be at least 1, got 0$"):
        check_value("rows", 0, Count)


@checked
def area(width: Count, height: "Count" = 1, *rest: Any, name: str | None = None, **others: Any) -> int:
    """The product."""
    return width * height


def test_a_function_checks_its_arguments():
    assert area(2, height=3, other=math.nan) == 6
    assert area.__doc__ == "The product."
    for call, says in (
        (lambda: area(0), "width must be at least 1, got 0"),
        (lambda: area(1, height="2"), "height must be a whole number, got '2'"),
        (lambda: area(1, name=5), "name must be text, got 5"),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        assert str(refused.value) == says


def test_the_wrong_item_of_a_list_is_named():
    with pytest.raises(ConfigError, match=r"^stop\[1\] must be text, got 5$"):
        check_value("stop", ["a", 5], str | Sequence[str])


@pytest.mark.parametrize("value", ["x" * 1000, 10**5000, "two\nlines", np.zeros((9, 9))], ids=type)
def test_what_was_given_is_shown_on_one_short_line(value):
    assert len(shown(value)) <= 64
    assert "\n" not in shown(value)


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_every_odd_value_of_a_field_is_accepted_or_refused_in_one_line(cls, name):
    messages = []
    for value in ODD:
        try:
            cls(**NEEDED[cls] | {name: value})
        except ConfigError as error:
            messages.append(str(error))
    assert messages
    assert all("\n" not in message and len(message) < 300 for message in messages)


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_nan_is_refused_for_every_number(cls, name):
    if {int, float} & set(kinds(get_type_hints(cls, include_extras=True)[name])):
        with pytest.raises(ConfigError, match=name if cls is not Gamma else "gamma"):
            cls(**NEEDED[cls] | {name: math.nan})


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_every_number_has_bounds_and_a_default_within(cls, name):
    """Defaults are not checked when an object is made, and a new field must not be forgotten."""
    annotation = get_type_hints(cls, include_extras=True)[name]
    default = cls.__dataclass_fields__[name].default
    if default is not MISSING:
        assert wrong(default, annotation) is None
    assert not unbounded(annotation) or name in ("seed", "logit_bias")


def unbounded(annotation: Any) -> bool:
    if annotation in (int, float):
        return True
    if get_origin(annotation) is Annotated:
        inner = get_args(annotation)[0]
        return inner not in (int, float) and unbounded(inner)
    return any(unbounded(inner) for inner in get_args(annotation))


def test_lists_become_tuples():
    assert RuleConfig(name="rejection", branching=[2, 1]).branching == (2, 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Shape(width=100_000, length=100_000), "width must be at most 1024, got 100000"),
        (lambda: Shape(length=100_000), "length must be at most 256, got 100000"),
        (lambda: Shape(width=1024, length=5), "width × length must be at most 4096, got 1024 × 5"),
        (
            lambda: RuleConfig(name="rejection", branching=(1_000_000,)),
            "branching[0] must be at most 1024, got 1000000",
        ),
        (lambda: RuleConfig(name="rejection", branching=(64, 64)), "at most 4096 nodes"),
        (lambda: RuleConfig(name=["seeded"]), "rule must be text"),
        (lambda: Gamma(first=0), "gamma's first length must be at least 1"),
        (lambda: SamplingParams(logit_bias={1: math.nan}), "logit_bias[1] must be a number, got nan"),
    ],
)
def test_what_cannot_be_searched_is_refused(make, says):
    with pytest.raises(ConfigError) as refused:
        make()
    assert says in str(refused.value)
