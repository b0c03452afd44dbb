"""Stand-ins for modules that most runs import but never use; only the program installs them.

CPU seconds saved at the start of each process: torch._dynamo 1.1, wandb's launch module 0.4,
torchmetrics' plots 0.4, torch's FLOP counter 0.1. A stand-in defines only the names that other
modules read at import. Reading another name, or calling most of its functions, imports the real
module. At an upgrade, `python -X importtime -m app fit` shows whether a real module is imported,
and by which module.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any


class _Deferred(MetaPathFinder, Loader):
    """Finder of stand-ins for a module and its submodules, until a real one is loaded."""

    def __init__(self, name: str, *functions: str, **values: Any) -> None:
        self.name = name
        self.stand_ins = {name: {**values}}
        for function in functions:
            self.stand_ins[name][function] = self.later(name, function)

    @property
    def pending(self) -> bool:
        return self in sys.meta_path

    def load(self, name: str = "") -> ModuleType:
        if self.pending:
            sys.meta_path.remove(self)
            for stand_in in self.stand_ins:
                sys.modules.pop(stand_in, None)
        return importlib.import_module(name or self.name)

    def later(self, module: str, function: str) -> Callable:
        return lambda *args, **kwargs: getattr(self.load(module), function)(*args, **kwargs)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if f"{name}.".startswith(f"{self.name}."):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in self.stand_ins:
            module = _StandIn(spec.name)
            vars(module).update(self.stand_ins[spec.name], deferred=self)
            return module
        real = self.load(spec.name)
        spec.loader_state = real.__spec__
        return real

    def exec_module(self, module: Any) -> None:
        is_real = not isinstance(module, _StandIn)
        if is_real and module.__spec__.loader is self:  # Python has replaced the real module's spec
            module.__spec__ = module.__spec__.loader_state


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        full_name = f"{self.__name__}.{name}"
        if name.startswith("__"):
            raise AttributeError(full_name)
        if full_name in self.deferred.stand_ins:
            return importlib.import_module(full_name)
        return getattr(self.deferred.load(self.__name__), name)


class _NothingCompiled(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return not DYNAMO.pending and isinstance(instance, DYNAMO.load().OptimizedModule)


def _disable(function: Any = None, *args: Any, **settings: Any) -> Any:
    """Replace `torch._dynamo.disable` until the real module is loaded."""
    if not isinstance(function, FunctionType):
        return DYNAMO.load().disable(function, *args, **settings)
    disabled = functools.cache(lambda: DYNAMO.load().disable(function, *args, **settings))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        called = function if DYNAMO.pending else disabled()
        return called(*args, **kwargs)

    return call


OptimizedModule = _NothingCompiled("OptimizedModule", (), {})
DYNAMO = _Deferred(
    "torch._dynamo",
    OptimizedModule=OptimizedModule,
    disable=_disable,
    graph_break=lambda msg="": None,
)
DYNAMO.stand_ins["torch._dynamo.utils"] = {
    "is_compile_supported": DYNAMO.later("torch._dynamo.utils", "is_compile_supported"),
    "get_optimize_ddp_mode": lambda: "ddp_optimizer",  # torch's default
}
DYNAMO.stand_ins["torch._dynamo.trace_rules"] = {"clear_lru_cache": lambda: None}
PLOTS = _Deferred(
    "torchmetrics.utilities.plot",
    "plot_single_or_multi_val",
    "plot_confusion_matrix",
    "plot_curve",
    _AX_TYPE=object,
    _CMAP_TYPE=object,
    _PLOT_OUT_TYPE=object,
)
FLOPS = _Deferred("torch.utils.flop_counter", "FlopCounterMode")
# a run asks it for inputs of a job that this process staged, and it stages none
LAUNCH = _Deferred("wandb.sdk.launch")
LAUNCH.stand_ins["wandb.sdk.launch.inputs"] = {}
LAUNCH.stand_ins["wandb.sdk.launch.inputs.internal"] = {
    "StagedLaunchInputs": lambda: SimpleNamespace(apply=lambda run: None)
}


def defer_imports() -> None:
    """Install the stand-ins of modules that are not yet imported. Safe to call again."""
    for hook in (DYNAMO, PLOTS, FLOPS, LAUNCH):
        if hook.name not in sys.modules and not hook.pending:
            sys.meta_path.insert(0, hook)
