"""Imports point downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tandem"
ROWS = (
    ("errors",),
    ("types",),
    ("config", "garbage"),
    ("kv", "telemetry", "models"),
    ("placement",),
    ("engines",),
    ("runner",),
    ("cluster",),
    ("api",),
    ("bench", "verify"),
    ("cli",),
)
"""Lowest first. Packages in one row do not know one another."""
LEVEL = {name: level for level, row in enumerate(ROWS) for name in row}
NEVER = {("api", "engines"), ("config", "types"), ("config", "errors")}
"""Downwards, but unwanted: the api speaks to engines through the node alone, and settings need nothing."""
HEAVY = {"mlx", "mlx_lm", "transformers", "gguf", "torch", "vllm"}
MAY_IMPORT_HEAVY = {
    "engines/mlx": {"mlx", "mlx_lm", "transformers"},
    "engines/vllm": {"torch", "vllm"},
    "models/gguf": {"gguf"},
}
"""Folders whose modules may import heavy libraries at their top, because only those who need them import the module."""


def modules() -> list[Path]:
    """Every module of the package."""
    found = sorted(SOURCE.rglob("*.py"))
    assert len(found) > 50
    return found


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Modules imported anywhere below `tree`, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, "imports are absolute, or from the same package"
            if node.level == 0:
                module = node.module or ""
                yield module, node.lineno
                if module == "tandem":
                    yield from ((f"tandem.{alias.name}", node.lineno) for alias in node.names)


def owner(path: Path) -> str:
    """The package, or the module at the top, that `path` belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_package_has_a_row() -> None:
    assert {owner(path) for path in modules()} - {"__init__", "__main__"} == set(LEVEL)


@pytest.mark.parametrize("package", sorted(LEVEL))
def test_imports_point_downwards(package: str) -> None:
    wrong = []
    for path in modules():
        if owner(path) != package:
            continue
        for module, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            parts = module.split(".")
            if parts[0] != "tandem" or len(parts) < 2 or parts[1] not in LEVEL or parts[1] == package:
                continue
            if LEVEL[parts[1]] >= LEVEL[package] or (package, parts[1]) in NEVER:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {module}")
    assert wrong == []


def top_level(path: Path) -> Iterator[tuple[str, int]]:
    """Modules that importing `path` imports: not those inside functions or under TYPE_CHECKING."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Try):
            yield from imported(node)


def test_heavy_libraries_are_imported_where_they_are_needed() -> None:
    wrong = []
    for path in modules():
        folder = path.parent.relative_to(SOURCE).as_posix()
        allowed = MAY_IMPORT_HEAVY.get(folder, set())
        for module, line in top_level(path):
            if module.split(".")[0] in HEAVY - allowed:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {module}")
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["tandem.api.server", "tandem.cluster.node", "tandem.models.store", "tandem.cli.serving"]
)
def test_the_server_process_stays_light(module: str) -> None:
    script = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert HEAVY.isdisjoint(done.stdout.split())
