"""What most runs never need of the libraries, imported when something needs it and not before.

Of the 3.9 s of CPU time that the imports of a process took, torch's compiler took 1.2 (its tracer, inductor, sympy),
pyplot 0.6 and triton 0.3; a training reaches them everywhere:

* `torch._dynamo`: torchvision for a question that `roi_align` alone asks, Lightning for an `isinstance`, torch.optim
  for a break of a graph that nobody traces, DistributedDataParallel for its default mode
* `torchmetrics.utilities.plot`, which imports pyplot: every metric, for its method `plot`
* `torch.utils.flop_counter`, which imports triton: Lightning, for its summary of a model

They get what they ask for from here; whoever asks for anything else, as torch.compile does, or calls a function, gets
the module itself. At an upgrade: `python -X importtime` prints who imports what.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from app.system.patches import expects


class Deferred(MetaPathFinder, Loader):
    """A module, with those below it, in whose place stand-ins are found until they do not suffice.

    Args:
        name: Of the module.
        before: Called before the module itself is imported.
    """

    def __init__(self, name: str, before: Callable[[], None] = lambda: None) -> None:
        self.name, self.before = name, before
        self.provided: dict[str, dict[str, Any]] = {}  # name of a stand-in: what it has

    @property
    def pending(self) -> bool:
        """Whether the stand-ins have sufficed so far."""
        return self in sys.meta_path

    def defer(self) -> None:
        """Begin to find the stand-ins, unless the module has been imported already."""
        if self.name not in sys.modules and not self.pending:
            sys.meta_path.insert(0, self)

    def load(self, name: str = "") -> ModuleType:
        """Import the module, or one below it, in place of the stand-ins."""
        if self.pending:
            sys.meta_path.remove(self)
            for each in self.provided:
                sys.modules.pop(each, None)
            self.before()
        return importlib.import_module(name or self.name)

    def later(self, function: str) -> Callable[..., Any]:
        """A function of the module, which is imported at the first call."""
        return lambda *args, **kwargs: getattr(self.load(), function)(*args, **kwargs)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Answer for the module and all below it."""
        below = f"{name}.".startswith(f"{self.name}.")
        return ModuleSpec(name, self, is_package=name == self.name) if below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a stand-in, or import the module where there is none."""
        return _StandIn(spec.name, self) if spec.name in self.provided else self.load(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Fill a stand-in; a module itself is complete, and gets its own spec back."""
        if isinstance(module, _StandIn):
            vars(module).update(self.provided[module.__name__])
        elif module.__spec__ is not None and module.__spec__.loader is self:  # torch._dynamo.config kept its own
            module.__spec__ = PathFinder.find_spec(module.__name__, sys.modules[self.name].__path__)


class _StandIn(ModuleType):
    def __init__(self, name: str, deferred: Deferred) -> None:
        super().__init__(name)
        self._deferred = deferred

    def __getattr__(self, name: str) -> Any:
        below = f"{self.__name__}.{name}"
        if name.startswith("__"):
            raise AttributeError(below)
        if below in self._deferred.provided:
            return importlib.import_module(below)
        return getattr(self._deferred.load(self.__name__), name)


def defer_imports() -> None:
    """From here on, import these modules when something needs more of them than the stand-ins have."""
    for deferred in (COMPILER, PLOTS, FLOPS):
        deferred.defer()


# -- the compiler ---------------------------------------------------------------------------------------------------

_disabled: list[Any] = []  # functions that tracing has to leave alone


@expects("torch.optim:Optimizer.zero_grad.__wrapped__")
def _ask_again() -> None:
    while _disabled:  # torch._disable_dynamo keeps the answer
        del _disabled.pop().__dynamo_disable


COMPILER = Deferred("torch._dynamo", before=_ask_again)


def _disable(function: Any = None, recursive: bool = True, *, wrapping: bool = True, **settings: Any) -> Any:
    """Keep a function out of what is traced, once something is.

    torch._disable_dynamo asks without wrapping, and keeps the answer in `__dynamo_disable`; others, as decorators.
    """
    if not isinstance(function, FunctionType):
        return COMPILER.load().disable(function, recursive, wrapping=wrapping, **settings)
    if not wrapping:
        _disabled.append(function)
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if COMPILER.pending else disabled())(*args, **kwargs)

    @functools.cache
    def disabled() -> Any:
        return COMPILER.load().disable(function, recursive, **settings)

    return call


class _Compiled(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return not COMPILER.pending and isinstance(instance, COMPILER.load().OptimizedModule)


class OptimizedModule(metaclass=_Compiled):
    """In a type check, what torch.compile makes of a module; nothing is one as long as nothing is compiled."""


COMPILER.provided = {
    COMPILER.name: {"OptimizedModule": OptimizedModule, "disable": _disable, "graph_break": lambda msg="": None},
    f"{COMPILER.name}.utils": {
        "is_compile_supported": lambda device: COMPILER.load("torch._dynamo.utils").is_compile_supported(device),
        "get_optimize_ddp_mode": lambda: "ddp_optimizer",  # its default
    },
    f"{COMPILER.name}.trace_rules": {"clear_lru_cache": lambda: None},
}

# -- plots of metrics, and counts of operations ---------------------------------------------------------------------

PLOTS = Deferred("torchmetrics.utilities.plot")
_plots = ("plot_single_or_multi_val", "plot_confusion_matrix", "plot_curve")
_types = {"_AX_TYPE": object, "_CMAP_TYPE": object, "_PLOT_OUT_TYPE": object}  # in annotations alone
PLOTS.provided = {PLOTS.name: _types | {name: PLOTS.later(name) for name in _plots}}

FLOPS = Deferred("torch.utils.flop_counter")
FLOPS.provided = {FLOPS.name: {"FlopCounterMode": FLOPS.later("FlopCounterMode")}}  # an instance of it, to be exact
