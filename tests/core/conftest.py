"""Fixtures of the engine core's tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def package_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The package's log, which does not propagate by itself."""
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    return caplog
