"""docs/environment.md: every variable of vLLM's that users set is read, or the page says why it is not."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from ascend_vllm import envs
from ascend_vllm.args.hf_files import find_directory
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.models import registry
from tests.benchmark_modules import load_script

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")

READ = """
VLLM_API_KEY VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_LOGGING_LEVEL VLLM_CONFIGURE_LOGGING
VLLM_LOGGING_CONFIG_PATH VLLM_USE_MODELSCOPE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_CACHE_ROOT VLLM_PLUGINS
VLLM_CPU_KVCACHE_SPACE VLLM_MAX_N_SEQUENCES VLLM_SERVER_DEV_MODE VLLM_ASCEND_ENABLE_NZ ASCEND_VLLM_ATTENTION_OPS
USE_PFA_HIGH_PRECISION_MODE USE_IFA_HIGH_PRECISION_MODE USE_PREFIX_HIGH_PRECISION_MODE
ASCEND_RT_VISIBLE_DEVICES PYTORCH_NPU_ALLOC_CONF HCCL_OP_EXPANSION_MODE
VLLM_PP_LAYER_PARTITION INFER_MODE PTA_TORCHAIR_DECODE_GEAR_ENABLE PTA_TORCHAIR_DECODE_GEAR_LIST TORCHAIR_CACHE_HOME
EAGLE_USE_SAFE_AI_LAB_STYLE ENABLE_SPEC_METRIC
"""
NOT_READ = """
VLLM_RPC_TIMEOUT VLLM_WORKER_MULTIPROC_METHOD VLLM_NO_USAGE_STATS DO_NOT_TRACK VLLM_CONFIG_ROOT
VLLM_TRACE_FUNCTION VLLM_ALLOW_DEPRECATED_BLOCK_MANAGER_V1 PROMETHEUS_MULTIPROC_DIR
VLLM_IMAGE_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT
"""


def test_page_is_up_to_date() -> None:
    assert load_script("make_environment_doc").render() == PAGE, "run `make docs`"


@pytest.mark.parametrize("name", READ.split())
def test_variables_that_are_read(name: str) -> None:
    assert f'"{name}"' in (ROOT / "ascend_vllm" / "envs.py").read_text()
    assert f"| `{name}` |" in PAGE.split("## vLLM's variables that are not read")[0]


@pytest.mark.parametrize("name", NOT_READ.split())
def test_variables_that_are_not_read_are_named(name: str) -> None:
    assert f'"{name}"' not in (ROOT / "ascend_vllm" / "envs.py").read_text()
    assert f"`{name}`" in PAGE.split("## vLLM's variables that are not read")[1]


@pytest.mark.parametrize(
    ("name", "read", "wrong", "words"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", envs.cpu_kvcache_space_gib, ("four", "nan", "inf"), "a number of GiB"),
        ("VLLM_MAX_N_SEQUENCES", envs.max_n_sequences, ("x", "1.5", "-1", "inf"), "a whole number"),
        ("ASCEND_VLLM_NODE_WAIT_S", envs.node_wait_s, ("soon", "0", "inf"), "a number of seconds above 0"),
    ],
)
def test_wrong_numbers_are_named(
    name: str,
    read: Callable[[], float | None],
    wrong: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some ended the server with a traceback of float() or int()."""
    default = read()
    for value in wrong:
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"^{name} must be {words}, got '{value}'"):
            read()
    for value, number in (("7", 7), ("", default)):
        monkeypatch.setenv(name, value)
        assert read() == number


def test_modelscope_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert find_directory("--model", str(tmp_path)) == str(tmp_path)
    with pytest.raises(ConfigError, match="VLLM_USE_MODELSCOPE asks for ModelScope"):
        find_directory("--model", "some/model")


def test_plugins_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A plug-in that is installed, but not named, is as good as not installed."""
    installed = tmp_path / "own-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\nOwnForCausalLM = own:Own\n")
    (tmp_path / "own.py").write_text("from ascend_vllm.models.llama import LlamaForCausalLM as Own\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.resolve_model_class("OwnForCausalLM").__name__ == "LlamaForCausalLM"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ModelLoadError, match="OwnForCausalLM"):
        registry.resolve_model_class("OwnForCausalLM")
    monkeypatch.setenv("VLLM_PLUGINS", "other, OwnForCausalLM")
    assert registry.resolve_model_class("OwnForCausalLM").__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("content", "configure", "message"),
    [
        ("{", "1", "does not configure logging"),
        ('{"version": 2}', "1", "does not configure logging"),
        (None, "1", "cannot be read: No such file or directory"),
        ('{"version": 1}', "0", "VLLM_CONFIGURE_LOGGING=0 says to leave logging"),
    ],
)
def test_wrong_log_settings(content: str | None, configure: str, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "logging.json"
    if content is not None:
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-c", "from ascend_vllm.logger import init_logger; init_logger('ascend_vllm.x')"],
        env={"VLLM_LOGGING_CONFIG_PATH": str(path), "VLLM_CONFIGURE_LOGGING": configure, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and message in done.stderr


def test_wrong_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    done = subprocess.run(
        [sys.executable, "-c", "from ascend_vllm.logger import init_logger; init_logger('ascend_vllm.x')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "VLLM_LOGGING_LEVEL must be one of CRITICAL, " in done.stderr
