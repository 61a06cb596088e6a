"""Fixtures that every room's tests may use."""

from __future__ import annotations

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# `from tests.tiny_models import …` works from any room, whatever directory pytest was started in
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def demo_model_dir() -> str:
    """Directory of the demo model, trained once per machine and version (a minute or two on two cores)."""
    from ascend_vllm.entrypoints.demo import ensure_demo_model

    return ensure_demo_model()
