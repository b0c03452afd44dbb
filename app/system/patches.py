"""Declarations of private names of libraries, so that an upgrade fails with a name.

Most uses of private names stand in `lightning_patches`, `lightning_step_patches`, `torch_patches`, `wandb_patches` and
`deferred_imports`. Each function or class that uses one declares it with `expects`. `tests/test_patches.py` looks each
declared name up in the installed library, and finds undeclared ones.
"""

import importlib.metadata
import inspect
import re
from collections.abc import Callable
from typing import TypeVar

EXPECTED: dict[str, tuple[str, ...]] = {}  # patch: names that it needs, each as `module:Class.attribute`
Patch = TypeVar("Patch", bound=Callable[..., object])


def expects(*names: str) -> Callable[[Patch], Patch]:
    """Declare the private names that a patch uses.

    Args:
        names: Each as `module:name` or `module:Class.attribute`, also one that `Class.__init__` sets.
    """

    def declare(patch: Patch) -> Patch:
        EXPECTED[f"{patch.__module__}.{patch.__name__}"] = names
        return patch

    return declare


def missing(patch: str) -> str | None:
    """Return a patch's missing name with the library's version; None if all exist."""
    for name in EXPECTED[patch]:
        module, _, path = name.partition(":")
        try:
            found = _has(importlib.import_module(module), path)
        except ImportError:
            found = False
        if not found:
            library = module.partition(".")[0]
            version = importlib.metadata.version(library)
            return f"{patch} needs {name}, which {library} {version} does not have: see what took its place"
    return None


def _has(owner: object, path: str) -> bool:
    """Return whether a name exists, is annotated in the class, or is set on `self` somewhere in it."""
    name, _, rest = path.partition(".")
    if hasattr(owner, name):
        return not rest or _has(getattr(owner, name), rest)
    if rest or not isinstance(owner, type):
        return False
    classes = [cls for cls in owner.__mro__ if cls.__module__ != "builtins"]
    set_somewhere = re.compile(rf"\bself\.{name}(:[^=\n]+)? = ")
    return any(name in inspect.get_annotations(cls) or set_somewhere.search(inspect.getsource(cls)) for cls in classes)
