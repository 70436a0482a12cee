"""The layers of ARCHITECTURE.md, from the syntax trees; and what must be free of JAX, asked of an interpreter."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("model", "serving", "pallas_kernels", "sharding")

BELOW_EDGE = {"serving.engine", "model", "serving.core"}
BELOW_MODEL = {"pallas_kernels", "sharding", "serving.core"}
BELOW_APP = BELOW_EDGE | BELOW_MODEL | {
    "serving.bench", "serving.edge", "serving.cluster", "serving.runner", "serving.engine",
}  # fmt: skip
MAY_IMPORT = {
    "root": {"serving.app", "serving.cli"},
    "serving.cli": BELOW_APP | {"serving.app", "root"},
    "serving.app": BELOW_APP | {"root"},
    "serving.bench": {"serving.core"},
    "serving.edge": BELOW_EDGE,
    "serving.cluster": BELOW_EDGE,
    "serving.runner": BELOW_EDGE | BELOW_MODEL,
    "serving.engine": {"serving.core"},
    "model": BELOW_MODEL,
    "pallas_kernels": set[str](),
    "sharding": set[str](),
    "serving.core": set[str](),
}
"""Layer -> the layers that it may import besides itself."""

NOT_IN_CORE = {
    "asyncio", "threading", "multiprocessing", "concurrent", "time", "datetime", "random", "secrets", "os", "io",
    "socket", "subprocess", "pathlib", "queue", "select", "logging", "uuid",
}  # fmt: skip
JAX_FREE = (
    "headrace", "headrace.serving.cli", "headrace.model.config", "headrace.model.gguf_metadata",
    "headrace.model.tokenizer", "headrace.model.chat_template", "headrace.model.pull", "headrace.model.errors",
    "headrace.serving.app.serve", "headrace.serving.app.options",
    "headrace.serving.app.bench_command", "headrace.serving.app.bench_run", "headrace.serving.app.compare_run",
    "headrace.serving.app.plan_command",
)  # fmt: skip
JAX_FREE_FOLDERS = ("serving/bench", "serving/core", "serving/engine", "serving/edge", "serving/cluster")


def module_name(path: Path) -> str:
    """The import name of a file under the package: serving/core/plan.py -> serving.core.plan."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = [part for part in relative.parts if part != "__init__"]
    if parts[:2] == ["serving", "package_root"]:
        return ""
    return ".".join(parts)


def layer_of(module: str) -> str:
    """module: without the leading ``headrace.``; the empty string is the package itself."""
    parts = module.split(".")
    if parts[0] != "serving":
        return parts[0] or "root"
    return ".".join(parts[:2]) if len(parts) > 1 else "root"


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


KNOWN = frozenset(module_name(path) for path in sources())


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, function-level ones included; TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if name.removeprefix("headrace.") in KNOWN else node.module


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_line_imports_only_lines_below_it(path: Path) -> None:
    own = layer_of(module_name(path))
    for line, name in imports(path):
        assert name.split(".")[0] not in (*FOLDERS, "tests", "scripts"), f"{path}:{line}: import headrace.{name}"
        if name != "headrace" and not name.startswith("headrace."):
            continue
        other = layer_of(name.removeprefix("headrace").removeprefix("."))
        assert other == own or other in MAY_IMPORT[own], f"{path}:{line}: {own} may not import {other} ({name})"


@pytest.mark.parametrize("path", sorted((ROOT / "serving/core").rglob("*.py")), ids=lambda path: path.name)
def test_the_core_uses_the_pure_part_of_the_standard_library_alone(path: Path) -> None:
    for line, name in imports(path):
        top = name.split(".")[0]
        if top == "headrace":
            continue
        assert top in sys.stdlib_module_names, f"{path}:{line}: {name} is not in the standard library"
        assert top not in NOT_IN_CORE, f"{path}:{line}: the core has no I/O, clock, threads or randomness ({name})"


def test_edge_engine_core_and_the_command_line_never_load_jax() -> None:
    modules = list(JAX_FREE)
    for folder in JAX_FREE_FOLDERS:
        modules += ["headrace." + module_name(path) for path in (ROOT / folder).rglob("*.py")]
    script = (
        "import importlib, sys\n"
        f"for name in {sorted(set(modules))!r}:\n"
        "    importlib.import_module(name)\n"
        "    loaded = sorted({'jax', 'jaxlib', 'flax'} & set(sys.modules))\n"
        "    if loaded: raise SystemExit(f'{name} loads {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_pyproject_names_every_package_and_its_data() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"headrace"} | {
        "headrace." + module_name(path).replace("/", ".")
        for path in sources()
        if path.name == "__init__.py" and module_name(path)
    }
    assert set(tool["packages"]) == found
    data = {
        "headrace." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "package_root" not in path.parts
    }
    assert data <= set(tool["package-data"]), "files that are not Python must be listed as package data"


def test_every_folder_with_code_is_a_package() -> None:
    for path in sources():
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"
