"""What is written down in several places must agree."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

import ascend_vllm
from ascend_vllm.args.engine_args import EngineArgs, all_flags
from ascend_vllm.args.fields import flags_of
from ascend_vllm.args.tables.server import FrontendArgs, GenerateServerArgs
from tests.benchmark_modules import load_script
from tests.npu import simulator

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ascend_vllm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_flags_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == load_script("make_flags_doc").render(), "run `make docs`"
    for item in all_flags():
        assert f"| `{item.name}`" in page


def test_version() -> None:
    assert PROJECT["project"]["version"] == ascend_vllm.__version__
    assert f"## {ascend_vllm.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_torch_is_pinned_alike_everywhere() -> None:
    pins = re.findall(r"torch(?:_npu)?==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    pins += re.findall(r"torch_version=([\d.]+)", (ROOT / "scripts" / "create_venv.sh").read_text())
    assert len(pins) >= 4 and set(pins) == {"2.13.0"}


def test_console_command_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["ascend-vllm"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_data_files_of_the_package_are_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["ascend_vllm"]
    packaged = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    tracked = subprocess.run(
        ["git", "ls-files", "ascend_vllm"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    data = {ROOT / name for name in tracked.stdout.split() if not name.endswith(".py")}
    assert data <= packaged


def test_every_import_is_a_declared_dependency() -> None:
    declared = {re.split(r"[<>=;\[ ]", line)[0].lower() for line in PROJECT["project"]["dependencies"]}
    names = {"yaml": "pyyaml", "zmq": "pyzmq"}
    # they come with transformers, with fastapi and with pydantic, in the versions those need
    through_others = {"huggingface_hub": "transformers", "starlette": "fastapi", "pydantic_core": "pydantic"}
    # extras; imported only where the user asks for them
    optional = {"torch_npu", "ray", "opentelemetry"}
    import sys

    missing = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found = [node.module]
            else:
                continue
            for name in (full.partition(".")[0] for full in found):
                if name in sys.stdlib_module_names or name in optional or name in ("ascend_vllm", "__future__"):
                    continue
                if through_others.get(name, names.get(name, name)).lower() not in declared:
                    missing[name] = path.relative_to(ROOT)
    assert not missing


@pytest.mark.parametrize("owner", [FrontendArgs, GenerateServerArgs])
def test_supported_flags_of_the_servers_are_read_by_them(owner: type) -> None:
    """A flag that parses, is not refused and is read nowhere would be ignored silently."""
    sources = [*(PACKAGE / "entrypoints").rglob("*.py"), PACKAGE / "args" / "tables" / "server.py"]
    assert _unread(owner, sources) == []


def test_supported_flags_of_the_engine_are_read_by_it() -> None:
    assert _unread(EngineArgs, [*(PACKAGE / "entrypoints").rglob("*.py"), *(PACKAGE / "args").rglob("*.py")]) == []


def _unread(owner: type, sources: list[pathlib.Path]) -> list[str]:
    read = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    # a flag of which only some values exist (cpu among the devices, say) has nothing else to decide
    partly = {item.field for item in flags_of(owner) if item.unsupported is not None}
    without_effect = {item.field for item in flags_of(owner) if item.no_effect is not None}
    return [item.name for item in flags_of(owner) if item.field not in read | partly | without_effect]


def test_make_knows_its_targets() -> None:
    shown = subprocess.run(["make", "-n", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for target in (
        "serve",
        "demo-adapter",
        "test",
        "test-all",
        "test-clients",
        "test-fast",
        "test-asan",
        "test-tsan",
        "lint",
        "build",
        "clean",
    ):
        assert f"make {target}" in shown.stdout


# where the names of files in these pages begin
BASES = (ROOT, PACKAGE, ROOT / "csrc_ascend", ROOT / "docs")


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/adding_*.md"))]
)
def test_recipes_name_files_that_exist(page: str) -> None:
    """Names with a directory, such as `args/fields.py`, between backquotes."""
    names = set(re.findall(r"`([\w.-]+/[\w./-]*\w+/?)`", (ROOT / page).read_text(encoding="utf-8")))
    assert len(names) >= 4
    # what a build makes is not there in a fresh clone
    built = {name for name in names if name.startswith("build/")}
    assert [name for name in sorted(names - built) if not any((base / name).exists() for base in BASES)] == []


def test_commits_are_checked_as_make_lint_does() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    shown = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert [hook["entry"] for hook in hooks if hook["entry"] not in shown.stdout] == []
    assert len(hooks) == shown.stdout.count("check .venv/")


@pytest.mark.parametrize("script", [".ci/run", "scripts/create_venv.sh"])
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True, timeout=30)
    assert (ROOT / script).stat().st_mode & 0o111


def test_the_simulators_own_tests_use_nothing_of_the_package() -> None:
    """They are not run again when only the package has changed."""
    files = {*simulator.OWN_TESTS, *simulator.HELPERS}
    for name in files:
        text = (simulator.HERE / name).read_text(encoding="utf-8")
        assert "ascend_vllm" not in text, name
        imported = {f"{module}.py" for module in re.findall(r"from tests\.npu(?: import |\.)(\w+)", text)}
        assert imported - {"simulator.py"} <= files, name
