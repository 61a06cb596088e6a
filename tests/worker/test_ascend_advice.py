"""What is said at start of models that need attention in high precision on NPUs."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm import envs
from ascend_vllm.attention.ascend import AscendAttention
from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.worker import worker as worker_module
from ascend_vllm.worker.worker import Worker
from tests.plain_arch import make_arch
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

PFA, IFA, PREFIX = (f"USE_{name}_HIGH_PRECISION_MODE" for name in ("PFA", "IFA", "PREFIX"))
QWEN2_7B = {"architecture": "Qwen2ForCausalLM", "arch": make_arch(28, hidden_size=3584)}
QWEN2_57B = {"architecture": "Qwen2MoeForCausalLM", "arch": make_arch(28, hidden_size=3584)}
QWEN2_72B = {"architecture": "Qwen2ForCausalLM", "arch": make_arch(80, hidden_size=8192)}
SMALL = {"architecture": "Qwen2ForCausalLM", "arch": make_arch(24, hidden_size=896)}
LONG = {"max_model_len": 32768}
CACHED = {"enable_prefix_caching": True}


def config_of(options: dict[str, Any]) -> EngineConfig:
    return make_config(tiny_model("qwen2"), **options)


@pytest.mark.parametrize(
    ("options", "switches", "named"),
    [
        (QWEN2_7B, {}, []),
        (QWEN2_7B, {PFA: "0"}, [PFA]),
        (QWEN2_57B, {PFA: "0"}, [PFA]),
        (QWEN2_72B, {PFA: "0"}, []),
        (SMALL | LONG | CACHED, {PFA: "0"}, []),
        (QWEN2_7B | LONG, {}, [IFA]),
        (QWEN2_57B | LONG, {}, [IFA]),
        (QWEN2_72B | LONG, {}, [IFA]),
        (QWEN2_72B | LONG, {IFA: "1"}, []),
        (QWEN2_7B | CACHED, {}, [PREFIX]),
        (QWEN2_57B | CACHED, {}, []),
        (QWEN2_72B | CACHED, {}, [PREFIX]),
        (QWEN2_7B | LONG | CACHED, {PFA: "0"}, [PFA, IFA, PREFIX]),
        (QWEN2_7B | LONG | CACHED, {PFA: "1", IFA: "1", PREFIX: "1"}, []),
    ],
)
def test_models_that_need_high_precision(
    options: dict[str, Any], switches: dict[str, str], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (PFA, IFA, PREFIX):
        monkeypatch.delenv(name, raising=False)
    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    advice = AscendAttention(128).advice(config_of(options))
    assert len(advice) == len(named)
    for sentence, name in zip(advice, named, strict=True):
        assert name in sentence


def test_the_worker_logs_a_backends_advice(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(CpuAttention, "advice", lambda _self, config: [f"mind {config.model.architecture}"])
    monkeypatch.setattr(worker_module.logger, "propagate", True)
    Worker(config_of({})).load_model()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == ["mind Qwen2ForCausalLM"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (PFA, "yes"),
        (IFA, "2"),
        (PREFIX, "true"),
        ("ASCEND_VLLM_ATTENTION_OPS", "paged"),
        ("VLLM_ASCEND_ENABLE_NZ", "3"),
    ],
)
def test_switches_with_other_values_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} must be .* got '{value}'"):
        envs.ascend_enable_nz() if name == "VLLM_ASCEND_ENABLE_NZ" else AscendAttention(128)
