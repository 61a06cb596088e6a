"""Fixtures of the ops' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ascend_vllm.ops import native


@pytest.fixture(scope="module", params=native.available_cpu_isas() or ["reference"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once per instruction set of this machine; on references if the kernels are not built."""
    before = native.cpu_isa()
    if before is not None:
        native.set_cpu_isa(request.param)
    yield request.param
    if before is not None:
        native.set_cpu_isa(before)


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
