"""The import rules of docs/architecture.md, checked on the source and in fresh interpreters."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "steelyard"
BASE = {
    "types",
    "errors",
    "clock",
    "config",
    "config_file",
    "config_notes",
    "config_rules",
    "ids",
    "keys",
    "metrics",
    "digests",
    "packed_floats",
    "log",
    "durable",
    "signing",
}
STAGES = {
    "tasks", "coordinator", "harness", "sandbox", "environments", "gateway", "inference",
    "traces", "scoring", "assembly", "trainer", "weights",
}  # fmt: skip
JOINERS = {"run", "cli", "cluster", "sim", "observe", "testing"}
TORCH_PACKAGES = {"trainer", "weights"}
TORCH_MODULES = {
    "inference.model_runner", "inference.kv_cache", "inference.engine_core", "inference.local_engine",
    "inference.vllm_worker.steelyard_vllm_worker", "scoring.reward_model",
}  # fmt: skip
HEAVY = {"torch", "transformers", "safetensors"}
PURE = (
    "coordinator.state", "coordinator.transitions", "coordinator.admission", "coordinator.books",
    "coordinator.retry_rules", "assembly",
)  # fmt: skip
FORBIDDEN_IN_PURE = {"time", "socket", "sqlite3", "subprocess", "asyncio", "datetime", "random", "os"}


def all_modules() -> list[str]:
    paths = sorted(SOURCE.rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__").removesuffix("__init__") for name in names]


MODULES = [name for name in all_modules() if name]


@functools.cache
def imported_by(module: str) -> frozenset[str]:
    path = SOURCE / (module.replace(".", "/") + ".py")
    if not path.exists():
        path = SOURCE / module.replace(".", "/") / "__init__.py"
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(names)


def ours(names: frozenset[str]) -> set[str]:
    return {name.removeprefix("steelyard.").split(".")[0] for name in names if name.startswith("steelyard.")}


def may_import_torch(module: str) -> bool:
    return module.split(".")[0] in TORCH_PACKAGES or module in TORCH_MODULES


def heavy_imports(module: str) -> set[str]:
    return {name.split(".")[0] for name in imported_by(module)} & HEAVY


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    package = module.split(".")[0]
    imported = ours(imported_by(module)) - {package}
    if package in BASE:
        assert imported <= BASE, f"{module} is a base module and may import only base modules, got {imported - BASE}"
    elif package == "processes":
        assert imported <= BASE
    elif package in STAGES:
        allowed = BASE | {"processes"}
        assert imported <= allowed, f"{module} is a stage and may not import {imported - allowed}"
    elif package == "allocation":
        assert not imported & STAGES
    else:
        assert package in JOINERS, f"{package} has no import rule: add it to docs/architecture.md and here"


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_are_imported_only_where_they_belong(module: str) -> None:
    heavy = heavy_imports(module)
    assert may_import_torch(module) or not heavy or module.startswith("testing."), f"{module} imports {heavy}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(PURE)])
def test_pure_logic_does_no_io_and_never_asks_for_the_time(module: str) -> None:
    found = {name.split(".")[0] for name in imported_by(module)} & FORBIDDEN_IN_PURE
    assert not found, f"{module} is pure and may not import {found}"


def test_no_light_module_loads_torch_in_a_fresh_interpreter() -> None:
    light = [
        f"steelyard.{module}"
        for module in MODULES
        if not any(heavy_imports(dependency) for dependency in closure(module)) and not module.endswith("__main__")
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' loads torch'\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    assert {
        f"steelyard.{name}" for name in ("coordinator.service", "gateway.service", "run.control", "cli.main")
    } <= set(light)


def closure(module: str) -> set[str]:
    """The module and all of ours that it imports, directly or not."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        dependencies = {imported.removeprefix("steelyard.") for imported in imported_by(name)}
        todo += [dependency for dependency in dependencies if dependency in MODULES]
    return seen


def test_every_module_is_at_most_500_lines_and_every_function_at_most_60() -> None:
    for module in MODULES:
        path = SOURCE / (module.replace(".", "/") + ".py")
        if not path.exists():
            continue
        text = path.read_text()
        assert len(text.splitlines()) <= 500, f"{module} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= 60, f"{module}.{node.name} has {length} lines"
