"""Declarations of private names of libraries, so that an upgrade fails with a name.

Most uses of private names stand in `lightning_patches`, `lightning_step_patches`, `torch_patches`, `wandb_patches` and
`deferred_imports`. Each function or class that uses one declares it with `expects`. `tests/test_patches.py` looks each
declared name up in the installed library, and finds undeclared ones.
"""

from collections.abc import Callable
from typing import TypeVar

EXPECTED: dict[str, tuple[str, ...]] = {}  # names that a patch needs, each as `module:Class.attribute`
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
