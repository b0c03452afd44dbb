"""Declarations of the private names of libraries that this package uses.

Most uses of private names are in `lightning_patches`, `torch_patches`, `wandb_patches` and
`app.training.step_patches`. Each function or class that uses one declares it
with `expects`. `tests/test_patches.py` fails if an installed library lacks a declared name, or if
the code uses an undeclared one.
"""

from collections.abc import Callable
from typing import TypeVar

# private names that each patch needs, as `module:Class.attribute`
EXPECTED: dict[str, tuple[str, ...]] = {}
Patch = TypeVar("Patch", bound=Callable[..., object])


def expects(*names: str) -> Callable[[Patch], Patch]:
    """Declare the private names that a patch uses.

    Args:
        names: Private names, each as `module:name` or `module:Class.attribute`. The attribute may
            be one that only `Class.__init__` sets.
    """

    def declare(patch: Patch) -> Patch:
        EXPECTED[f"{patch.__module__}.{patch.__name__}"] = names
        return patch

    return declare
