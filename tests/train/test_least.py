"""A time in which a new drafter would learn next to nothing is refused."""

import pytest
import torch

from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.train import least
from redrafter.train.least import check_time, measure_position
from tests.helpers.toys import CONFIG, OPTIONS
from tests.helpers.zoo import make_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(make_model(dtype=torch.float32))


def test_the_speed_of_a_small_update(target):
    assert 0 < measure_position(target, OPTIONS, CONFIG) < 0.1


@pytest.mark.parametrize(("own", "enough"), [(True, 43), (False, 29)])
def test_a_time_that_is_too_short_is_refused_with_one_that_is_not(target, monkeypatch, own, enough):
    """0.01 s for a position: 2000 take 20 s, seven tenths of what is left after the texts."""
    monkeypatch.setattr(least, "measure_position", lambda *_: 0.01)
    check_time(target, OPTIONS, CONFIG, left=enough + 1, spent=60.0, own=own)
    with pytest.raises(
        ConfigError, match=r"learn from 1\d\d\d positions here, .* give --minutes 2 or more, or .*--init-"
    ):
        check_time(target, OPTIONS, type(CONFIG)(minutes=1), left=enough - 1, spent=60.0, own=own)
    with pytest.raises(ConfigError, match="learn from 0 positions"):
        check_time(target, OPTIONS, type(CONFIG)(minutes=1), left=0.0, spent=60.0, own=own)
