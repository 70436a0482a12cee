"""Rules of the house that a reader would otherwise have to remember."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("model", "serving", "pallas_kernels", "sharding")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
BANNED_MODULES = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}
BANNED_IN_CLASSES = ("Manager", "Helper", "Mixin", "Util")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bfor now\b", re.IGNORECASE)


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


EVERY_FILE = python_files(*SHIPPED, "scripts", "tests")
SHIPPED_FILES = python_files(*SHIPPED)


def by_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_kernel(path: Path) -> bool:
    return path.parts[len(ROOT.parts)] == "pallas_kernels"


def functions(path: Path) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Each function with its length in lines, signature and body, without its docstring."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = node.body[0]
            documented = ast.get_docstring(node) is not None and first.end_lineno is not None
            docstring_lines = first.end_lineno - first.lineno + 1 if documented else 0  # type: ignore[operator]
            yield node, node.end_lineno - node.lineno + 1 - docstring_lines


@pytest.mark.parametrize("path", EVERY_FILE, ids=by_path)
def test_files_are_short_and_finished(path: Path) -> None:
    text = path.read_text()
    if not is_kernel(path):
        assert len(text.splitlines()) <= MAX_FILE_LINES
    if path != Path(__file__).resolve():
        assert not UNFINISHED.search(text), UNFINISHED.search(text)
    assert path.stem not in BANNED_MODULES


CPP_FILES = sorted(
    path for folder in ("pallas_kernels", "tests") for end in ("cc", "h") for path in (ROOT / folder).rglob(f"*.{end}")
)


@pytest.mark.parametrize("path", CPP_FILES, ids=by_path)
def test_cpp_files_are_short_too(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("//") and len(lines) <= MAX_FILE_LINES
    assert not [number for number, line in enumerate(lines, 1) if len(line) > 120]
    assert not UNFINISHED.search("\n".join(lines))


@pytest.mark.parametrize("path", python_files(*SHIPPED, "scripts"), ids=by_path)
def test_functions_are_short(path: Path) -> None:
    limit = MAX_KERNEL_LINES if is_kernel(path) else MAX_FUNCTION_LINES
    long = [f"{node.name} ({lines} lines)" for node, lines in functions(path) if lines > limit]
    assert not long


@pytest.mark.parametrize("path", SHIPPED_FILES, ids=by_path)
def test_names_say_something_and_state_has_an_owner(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ClassDef):
            assert not any(word in node.name for word in BANNED_IN_CLASSES), f"{path}:{node.lineno}: {node.name}"
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno}: module state"


@pytest.mark.parametrize("path", SHIPPED_FILES, ids=by_path)
def test_headrace_has_no_environment_variables_of_its_own(path: Path) -> None:
    """Options are arguments: what a process does is on its command line and in its printed configuration."""
    assert not re.search(r"\bgetenv\(|HEADRACE_[A-Z]|\benviron\.get\(|\benviron\[[^]]*\](?!\s*=)", path.read_text())


def test_the_architecture_page_names_every_module() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [
        str(path.relative_to(ROOT))
        for path in SHIPPED_FILES
        if path.name not in ("__init__.py", "__main__.py") and f"`{path.relative_to(ROOT)}`" not in page
    ]
    assert not missing


@pytest.mark.parametrize(
    "name", ["README.md", "ARCHITECTURE.md", "PROTOCOL.md", "DECISIONS.md", "CHANGELOG.md", "LICENSE"]
)
def test_root_documents_are_there_and_name_no_machine(name: str) -> None:
    text = (ROOT / name).read_text()
    assert len(text) > 400
    assert not re.search(r"/root/|/home/[a-z]+/|file:///", text)
