"""torch's compiler, imported when something is compiled and not before.

`import torch._dynamo` takes a third of what all imports of a process take (its tracer, inductor, sympy, triton: 1.2 of
3.9 s of CPU time), and eager training reaches it everywhere: torchvision for a question that `roi_align` alone asks,
Lightning for an `isinstance`, torch.optim for a break of a graph that nobody traces, DistributedDataParallel for its
default mode. They get what they ask for from here; whoever asks for anything else, as torch.compile does, gets the
compiler itself. At an upgrade: what eager code asks for is printed by `python -X importtime` above the first line of
`torch._dynamo.symbolic_convert`.
"""

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from app.system.patches import expects

COMPILER = "torch._dynamo"
_disabled: list[Any] = []  # functions that tracing has to leave alone


class DeferredCompiler(MetaPathFinder, Loader):
    """Finds the stand-ins in place of the compiler's modules, until one of them does not suffice."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Answer for the compiler and all of its modules."""
        return ModuleSpec(name, self, is_package=name == COMPILER) if f"{name}.".startswith(f"{COMPILER}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stand-in of a module, or import the compiler where there is none."""
        return _StandIn(spec.name) if spec.name in _PROVIDED else compiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a stand-in; a module of the compiler's is complete, and gets its own spec back."""
        if isinstance(module, _StandIn):
            vars(module).update(_PROVIDED[module.__name__])
        else:
            module.__spec__ = importlib.machinery.PathFinder.find_spec(module.__name__, sys.modules[COMPILER].__path__)


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        below = f"{self.__name__}.{name}"
        if name.startswith("__"):
            raise AttributeError(below)
        return importlib.import_module(below) if below in _PROVIDED else getattr(compiler(self.__name__), name)


_finder = DeferredCompiler()


def defer_compiler() -> None:
    """From here on, import the compiler when something needs more of it than eager code does."""
    if COMPILER not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


@expects("torch.optim:Optimizer.zero_grad.__wrapped__")
def compiler(name: str = COMPILER) -> ModuleType:
    """Import the compiler, or a module of it, in place of its stand-ins."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
        for provided in _PROVIDED:
            sys.modules.pop(provided, None)
        while _disabled:  # torch._disable_dynamo asks again
            del _disabled.pop().__dynamo_disable
    return importlib.import_module(name)


def _disable(function: Any = None, recursive: bool = True, *, wrapping: bool = True, **settings: Any) -> Any:
    """Keep a function out of what is traced, once something is.

    torch._disable_dynamo asks without wrapping, and keeps the answer in `__dynamo_disable`; others, as decorators.
    """
    if not isinstance(function, FunctionType):
        return compiler().disable(function, recursive, wrapping=wrapping, **settings)
    if not wrapping:
        _disabled.append(function)
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _finder in sys.meta_path else disabled())(*args, **kwargs)

    @functools.cache
    def disabled() -> Any:
        return compiler().disable(function, recursive, **settings)

    return call


class _Compiled(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return _finder not in sys.meta_path and isinstance(instance, compiler().OptimizedModule)


class OptimizedModule(metaclass=_Compiled):
    """In a type check, what torch.compile makes of a module; nothing is one as long as nothing is compiled."""


_PROVIDED: dict[str, dict[str, Any]] = {
    COMPILER: {"OptimizedModule": OptimizedModule, "disable": _disable, "graph_break": lambda msg="": None},
    f"{COMPILER}.utils": {
        "is_compile_supported": lambda device: compiler(f"{COMPILER}.utils").is_compile_supported(device),
        "get_optimize_ddp_mode": lambda: "ddp_optimizer",  # its default
    },
    f"{COMPILER}.trace_rules": {"clear_lru_cache": lambda: None},
}
