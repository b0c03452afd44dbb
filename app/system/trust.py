"""Which code flags and configs may run: classes of a few libraries, and the user's own modules."""

import functools
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TRUST = "APP_TRUST"  # environment variable: modules of `--trust`, separated by commas
LIBRARIES = ("app", "torch", "torchvision", "lightning", "torchmetrics")
INSTALLED = ("site-packages", "dist-packages")
# the user's modules when they were last looked up; jsonargparse changes the folder while it parses
_local: list[str] = []


def chosen_modules() -> list[str]:
    """Return the modules of `--trust`."""
    return list(filter(None, os.environ.get(TRUST, "").split(",")))


def trust_flags() -> list[str]:
    """Return a `--trust` flag for each of these modules."""
    flags = []
    for module in chosen_modules():
        flags += ["--trust", module]
    return flags


def local_modules() -> list[str]:
    """Return the top-level modules in the current folder and in the folders of PYTHONPATH.

    A folder is a module if it has an `__init__.py`. Otherwise, a config could name code inside a
    downloaded run.
    """
    entries = [os.curdir, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    folders = [Path(entry).resolve() for entry in entries]
    others = {*sys.stdlib_module_names, *LIBRARIES, "__main__"}
    modules = []
    for module in pkgutil.iter_modules(str(path) for path in folders if path.name not in INSTALLED):
        if not module.name.isidentifier():  # as of mypyc, which no config can name
            continue
        # another module of this name may come first
        if module.name not in others and _folder_of(module.name) in folders:
            modules.append(module.name)
    return modules


def _folder_of(module: str) -> Path | None:
    """Return the folder from which Python imports a top-level module."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).resolve()
    if spec.submodule_search_locations:
        return file.parents[1]
    return file.parent


def trusted_modules() -> list[str]:
    """Return the modules that flags and configs may import, because an import runs code."""
    _local[:] = local_modules()
    return [*LIBRARIES, *_local, *chosen_modules()]


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Return whether a dotted name is one of the modules, or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def distrust(name: str) -> str | None:
    """Return the reason why an import path must not be imported, or None."""
    if is_within(name, trusted_modules()):
        return None
    module = name.partition(".")[0]
    if importlib.util.find_spec(module) is None:
        return f"No module named '{module}'"
    return f"its code is not trusted: give --trust {module} to run it"


def module_of(value: Any) -> str:
    """Return the module that defines a class, a function, or the class of another object."""
    while isinstance(value, functools.partial):
        value = value.func
    if not isinstance(value, type) and not inspect.isroutine(value):
        value = type(value)
    return getattr(value, "__module__", None) or ""


def may_run(value: Any, bases: tuple[type, ...]) -> bool:
    """Return whether a flag may call the class or function that its value names.

    It counts as code of the module that defines it, not of one that re-exports it. The user's code
    may run; of a library, only subclasses of the flag's type may.

    Args:
        value: The class or function.
        bases: The classes that the flag's type names.
    """
    module = module_of(value)
    if is_within(module, [*_local, *chosen_modules()]):
        return True
    if inspect.isroutine(value) or not is_within(module, LIBRARIES):
        return False
    if not isinstance(value, type):
        value = type(value)
    return issubclass(value, bases)
