"""Arrays to torch and back: redrafter's torch core is the oracle."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from tests.helpers.skips import pytest_addoption, pytest_sessionfinish, pytest_terminal_summary  # noqa: F401

torch.set_num_threads(1)


def to_mlx(x):
    """A torch tensor as an MLX array; int64 becomes int32, as in redrafter_mlx."""
    x = x.numpy()
    return mx.array(x.astype(np.int32) if x.dtype == np.int64 else x)


def to_numpy(x):
    return x.numpy() if isinstance(x, torch.Tensor) else np.array(x)


@pytest.fixture
def same():
    """Assert that values of both sides are equal, integers and booleans exactly."""

    def check(own, oracle, atol=2e-5):
        own, oracle = to_numpy(own), to_numpy(oracle)
        assert own.shape == oracle.shape
        if oracle.dtype.kind == "f":
            np.testing.assert_allclose(own, oracle, atol=atol, rtol=1e-4)
        else:
            np.testing.assert_array_equal(own, oracle)

    return check
