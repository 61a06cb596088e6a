"""The package's layers as a test: imports point down, without cycles, and processes stay apart.

The rules are those of docs/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import warnings
from collections.abc import Iterator

import pytest

from ascend_vllm.config.arch import READERS

PACKAGE = "ascend_vllm"
ROOT = pathlib.Path(__file__).resolve().parents[2] / PACKAGE

# Top to bottom: a module may import its own layer and any layer below it. "" is the package's root modules.
LAYERS = (
    "tools",
    "entrypoints",
    "engine",
    "args",
    "core",
    "executor",
    "worker",
    "models",
    "layers",
    "attention",
    "ops",
    "distributed",
    "platforms",
    "sandbox",
    "config",
    "types",
    "",
)
# What a process's entry module must never reach, through any chain of imports at the top of modules or in them.
PROCESSES = {
    "core.proc": {"entrypoints", "engine"},
    "worker.worker": {"entrypoints", "engine", "core", "executor"},
    "executor.worker_process": {"entrypoints", "engine", "core"},
    "entrypoints.openai.app": {"core", "executor", "worker", "models", "layers"},
    "entrypoints.openai.api_server": {"executor", "worker", "models", "layers"},
    "entrypoints.templates.process": {"engine", "core", "executor", "worker", "models", "layers"},
    "core.structured.compile_process": {"entrypoints", "engine", "executor", "worker", "models", "layers"},
}
DEVICE_MODULES = {"torch_npu", "torchair", "npugraph_ex"}
# all that import them, by import_module in functions: most machines have none of them
DEVICE_FILES = ("platforms/npu.py", "platforms/npu_compiler.py")
# a hint: a file is cut where a second reason to change begins
MANY_LINES = 600
# Who sees config.json as it is: those that read and check the file, the reader that makes an `ArchConfig` of it, what
# hands the one to the other, and what reads labels and activations of pooling models' heads.
RAW_CONFIG_FILES = (
    "args/draft_model.py",
    "args/engine_args.py",
    "args/hf_checks.py",
    "args/hf_files.py",
    "args/pooling.py",
    "config/arch.py",
    "config/families.py",
)


@functools.cache
def _modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        found[name.removesuffix("__init__").rstrip(".")] = path
    return found


@functools.cache
def _nodes(path: pathlib.Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(path: pathlib.Path, *, for_types: bool = False) -> Iterator[str]:
    """Absolute names a file imports; those that only type checkers see, if they are asked for."""
    branches = [] if for_types else filter(_is_for_types, _nodes(path))
    type_only = {id(node) for branch in branches for node in ast.walk(branch)}
    for node in _nodes(path):
        if id(node) in type_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _graph(*, for_types: bool) -> dict[str, set[str]]:
    known = _modules()
    graph = {}
    for name, path in known.items():
        targets = set()
        for imported in _imports(path, for_types=for_types):
            if imported.startswith(f"{PACKAGE}."):
                target = imported.removeprefix(f"{PACKAGE}.")
                while target and target not in known:
                    target = target.rpartition(".")[0]
                targets.add(target)
        graph[name] = targets - {name}
    return graph


def _layer(module: str) -> int:
    head = module.split(".")[0]
    return LAYERS.index(head) if head in LAYERS else LAYERS.index("")


@pytest.mark.parametrize("for_types", [False, True])
def test_imports_point_down(for_types: bool) -> None:
    wrong = [
        f"{module} imports {target}, a layer above it"
        for module, targets in _graph(for_types=for_types).items()
        if module  # the package's lazy __init__ names everything
        for target in targets
        if _layer(target) < _layer(module)
    ]
    assert wrong == []


@pytest.mark.parametrize("for_types", [False, True])
def test_no_cycles(for_types: bool) -> None:
    graph = _graph(for_types=for_types) | {"": set()}  # the package's lazy __init__ names everything
    done: set[str] = set()
    cycles: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            cycles.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    assert cycles == []


@pytest.mark.parametrize("entry", PROCESSES)
def test_processes_stay_apart(entry: str) -> None:
    seen: set[str] = set()
    todo = [entry]
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += _graph(for_types=False)[module]
    assert sorted(module for module in seen if module.split(".")[0] in PROCESSES[entry]) == []


def _imports_by_call(path: pathlib.Path) -> Iterator[str]:
    """Texts, and constants of the file, that it hands to import_module or __import__."""
    constants = {
        node.targets[0].id: node.value.value
        for node in _nodes(path)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in _nodes(path):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__"))):
            continue
        for argument in node.args[:1]:
            value = argument.value if isinstance(argument, ast.Constant) else constants.get(ast.unparse(argument))
            if isinstance(value, str):
                yield value


def test_device_modules_are_imported_where_the_platform_is() -> None:
    """Attention and ops call torch_npu's operators by torch.ops, once a platform has imported it."""
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in _modules().values()
        if any(name.split(".")[0] in DEVICE_MODULES for name in (*_imports(path), *_imports_by_call(path)))
    }
    assert importing == set(DEVICE_FILES)


def test_only_envs_reads_the_environment() -> None:
    wrong = [
        f"{name}:{node.lineno}"
        for name, path in _modules().items()
        if name != "envs"
        for node in _nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert wrong == []


def test_config_json_is_read_in_one_room() -> None:
    """Everything else takes an `ArchConfig`."""
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in _modules().values()
        if re.search(r"hf_config\b", path.read_text())
    }
    assert naming == set(RAW_CONFIG_FILES)


def test_families_are_named_in_models_and_config() -> None:
    """Everything else goes by what `ArchConfig` says; the demo model is one of a family, and says so."""
    naming = [
        f"{name}:{node.lineno}"
        for name, path in _modules().items()
        if not name.startswith(("models.", "config.", "tools.demo."))
        for node in _nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in READERS
    ]
    assert naming == []


def test_transformers_models_are_never_imported() -> None:
    wrong = [
        f"{name}: {imported}"
        for name, path in _modules().items()
        for imported in _imports(path)
        if imported.startswith("transformers.models")
        or (imported.startswith("transformers.") and ("ForCausalLM" in imported or "AutoModel" in imported))
    ]
    assert wrong == []


@pytest.mark.filterwarnings("default::UserWarning")
def test_long_files_are_named() -> None:
    for name, path in _modules().items():
        num_lines = path.read_text().count("\n")
        if num_lines > MANY_LINES:
            warnings.warn(f"{name} has {num_lines} lines: does it have more than one reason to change?", stacklevel=1)


def test_exported_names_exist() -> None:
    import ascend_vllm

    for name in ascend_vllm.__all__:
        assert getattr(ascend_vllm, name) is not None
