"""Asking for the custom operators where there are none: what is refused, and what to do."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from ascend_vllm.errors import ConfigError
from ascend_vllm.ops import ascend_custom


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    """A package without the library, and nothing remembered."""
    monkeypatch.setattr(ascend_custom, "DIRECTORY", tmp_path)
    ascend_custom.enabled.cache_clear()
    yield
    ascend_custom.enabled.cache_clear()


@pytest.mark.parametrize("value", [None, "", " , "])
def test_nobody_asks(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("ASCEND_VLLM_CUSTOM_OPS", raising=False)
    else:
        monkeypatch.setenv("ASCEND_VLLM_CUSTOM_OPS", value)
    assert ascend_custom.enabled() == frozenset()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("all", "there is no .*libascend_vllm_npu.so.*: build it with CANN: cmake -S csrc_ascend -B build/npu"),
        ("store_kv", "cmake --install build/npu"),
        (
            "store_kv,attention",
            "'attention' is no custom operator; use all, or some of edit_and_sample, lora_expand, lora_shrink, norm",
        ),
        ("lora_shrink,store_kv", "lora_expand and lora_shrink go together"),
        ("store_kv,all", "'all' is no custom operator"),
    ],
)
def test_what_is_refused(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_VLLM_CUSTOM_OPS", value)
    with pytest.raises(ConfigError, match=message):
        ascend_custom.enabled()


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / ascend_custom.LIBRARY).write_bytes(b"no library")
    monkeypatch.setenv("ASCEND_VLLM_CUSTOM_OPS", "all")
    with pytest.raises(ConfigError, match=r"libascend_vllm_npu.so does not load: .*Source CANN's set_env.sh"):
        ascend_custom.enabled()


def test_every_operator_can_be_enabled() -> None:
    sources = pathlib.Path(__file__).resolve().parents[2] / "csrc_ascend" / "npu"
    operators = {path.parent.name for path in sources.glob("*/op_kernel.cpp")}
    # under the name of the op that it implements
    assert set(ascend_custom.OPERATORS) == operators
