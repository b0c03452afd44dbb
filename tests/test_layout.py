"""Structure: the allowed imports of each package, and documents that name only existing modules."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest
from harness import ROOT

# rooms, lowest first: a module imports only from lower rooms and from its own
ROOMS = (
    *("errors", "system", "record", "data", "modules", "training", "launch", "monitor", "command"),
    *("use", "lab", "cli", "__main__"),
)
LEVEL = {name: level for level, name in enumerate(ROOMS)}
MODULES = sorted(
    path
    for path in (ROOT / "app").rglob("*.py")
    if path.name != "__init__.py" or path.parent.name != "app"
)


def imported(module: Path) -> set[str]:
    """Return the names of the modules and packages directly in `app` that a module imports."""
    entries = set()
    for node in ast.walk(ast.parse(module.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            below = [f"app.{alias.name}" for alias in node.names] if node.module == "app" else []
            names = below or [node.module]
        entries |= {name.split(".")[1] for name in names if name.startswith("app.")}
    return entries


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(module: Path) -> None:
    entry = module.relative_to(ROOT / "app").parts[0].removesuffix(".py")
    up = {name for name in imported(module) - {entry} if LEVEL[name] >= LEVEL[entry]}
    assert not up, (
        f"{module.relative_to(ROOT)} imports {', '.join(sorted(up))}, on its own level or above"
    )


def test_the_package_maps_every_module() -> None:
    text = (ROOT / "app" / "__init__.py").read_text()
    missing = [
        path.relative_to(ROOT / "app")
        for path in MODULES
        if path.stem not in ("__init__", *re.findall(r"\w+", text))
    ]
    assert not missing


def test_contributing_names_what_there_is() -> None:
    names = re.findall(r"`(app(?:\.\w+)+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 20
    for name in names:
        pkgutil.resolve_name(name)
