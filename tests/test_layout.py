"""Structure: the allowed imports of each package, and documents that name only existing modules."""

import ast
import pkgutil
import re

import pytest
from harness import ROOT

# rooms, lowest first: a module imports only from lower rooms and from its own
ROOMS = (
    "errors",
    "system",
    "record",
    "data",
    "modules",
    "training",
    "launch",
    "monitor",
    "command",
    "use",
    "lab",
    "cli",
    "__main__",
)
MODULES = sorted({*(ROOT / "app").rglob("*.py")} - {ROOT / "app/__init__.py"})


def imported(module):
    """Return the names of the modules and packages directly in `app` that a module imports."""
    names = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "app":
            names += [f"app.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
    return {name.split(".")[1] for name in names if name.startswith("app.")}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_import_only_from_lower_rooms(module):
    entry = module.relative_to(ROOT / "app").parts[0].removesuffix(".py")
    lower = set(ROOMS[: ROOMS.index(entry) + 1])
    assert imported(module) <= lower, f"{module} imports from its own level or above"


def test_the_package_maps_every_module():
    words = re.findall(r"\w+", (ROOT / "app/__init__.py").read_text())
    assert {path.stem for path in MODULES} <= {"__init__", *words}


def test_contributing_names_existing_objects():
    names = re.findall(r"`(app(?:\.\w+)+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(names) > 20
    for name in names:
        pkgutil.resolve_name(name)
