"""Kernels that are compiled without running."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from redrafter import kernels
from redrafter.kernels import compile_kernels, compiles_only, norm_gate


def test_without_a_gpu_nothing_is_compiled():
    ran = []
    compile_kernels(lambda: ran.append(1), torch.device("cpu"))
    assert not ran
    assert not compiles_only()


def test_kernels_of_other_threads_run_meanwhile():
    token = kernels._compiles_only.set(True)
    try:
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(compiles_only).result()
        assert compiles_only()
    finally:
        kernels._compiles_only.reset(token)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_are_compiled_and_do_not_run():
    x, into = torch.ones(2, 16, device="cuda"), torch.zeros(2, 16, device="cuda")

    def add() -> None:
        norm_gate.add_norm(x, x[None], None, None, into=into)

    def fails() -> None:
        assert compiles_only()
        add()
        raise ValueError

    compile_kernels(fails, x.device)
    assert into.eq(0).all(), "the kernel did not run"
    assert not compiles_only()
    add()
    assert into.eq(2).all()
