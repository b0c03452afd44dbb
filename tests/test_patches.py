"""Private names of libraries: each one in use is declared, and exists."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest
from harness import SLOW

import app
from app.system.lightning_patches import complaint
from app.system.patches import EXPECTED

MODULES = [
    module.name
    for module in pkgutil.walk_packages(app.__path__, "app.")
    if module.name != "app.__main__"
]
for name in MODULES:
    importlib.import_module(name)  # runs its `expects` declarations
# documented in spite of the `_`, or made by ABCMeta
PUBLIC = {"_asdict", "_replace", "_exit", "_current_frames", "_abc_impl"}


def has(owner, path):
    """Return whether a dotted name exists in `owner`, or is annotated or set in its code."""
    name, _, rest = path.partition(".")
    if hasattr(owner, name):
        return not rest or has(getattr(owner, name), rest)
    if rest or not isinstance(owner, type):
        return False
    classes = [cls for cls in owner.__mro__ if cls.__module__ != "builtins"]
    set_somewhere = re.compile(rf"\bself\.{name}(:[^=\n]+)? = ")
    return any(
        name in inspect.get_annotations(cls) or set_somewhere.search(inspect.getsource(cls))
        for cls in classes
    )


@pytest.mark.parametrize("name", sorted({name for names in EXPECTED.values() for name in names}))
def test_declared_private_name_exists(name):
    module, _, path = name.partition(":")
    assert has(importlib.import_module(module), path)


def test_private_names_of_libraries_are_declared():
    """A module declares each private name that it imports, reads, or overrides."""
    trees = {name: ast.parse(inspect.getsource(importlib.import_module(name))) for name in MODULES}
    ours = {
        name
        for tree in trees.values()
        for node in ast.walk(tree)
        for name in [getattr(node, "name", None) or getattr(node, "attr", None)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        or isinstance(getattr(node, "ctx", None), ast.Store)
    }
    undeclared = []
    for module, tree in trees.items():
        names = [
            name
            for patch, names in EXPECTED.items()
            if patch.startswith(f"{module}.")
            for name in names
        ]
        declared = {word for name in names for word in re.split(r"[.:]", name)}
        nodes = list(ast.walk(tree))
        used = {
            alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)} - ours
        for cls in vars(importlib.import_module(module)).values():
            bases = [
                base
                for base in getattr(cls, "__mro__", ())[1:]
                if not base.__module__.startswith("app")
            ]
            if bases and cls.__module__ == module:
                used |= {name for name in vars(cls) if any(name in vars(base) for base in bases)}
        undeclared += [
            f"{module}: {name}" for name in used - declared - PUBLIC if re.match("_[^_]", name)
        ]
    assert not undeclared


def test_complaint_ignores_other_errors():
    assert complaint(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert complaint(ValueError("Expected more than 1 value per channel when training")) is None


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


EAGER = """
from app.system.program import set_up
set_up()
import sys, torch
def compiler(): return "torch._dynamo.symbolic_convert" in sys.modules
from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized, to_uncompiled
from torchvision.models import resnet18
class Module(__import__("lightning").LightningModule):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(2, 2)
    def forward(self, x): return self.layer(x)
module = Module()
sgd = torch.optim.SGD(module.parameters(), lr=0.1)
module(torch.ones(1, 2)).sum().backward(); sgd.step(); sgd.zero_grad(); sgd.state_dict()
assert _maybe_unwrap_optimized(module) is module
@torch.compiler.disable
def apart(x):
    return torch.compiler.is_compiling()
assert apart(1) is False
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
torch.nn.parallel.DistributedDataParallel(module)(torch.ones(1, 2))
import app.command.run
assert not compiler()
assert not {"matplotlib", "triton"} & set(sys.modules)
"""


PLOTS = """
from lightning.pytorch.utilities.model_summary import ModelSummary
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
module.example_input_array = torch.ones(1, 2)
assert ModelSummary(module).total_flops == 8
for metric in MulticlassAccuracy(2), MulticlassConfusionMatrix(2):
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    figure, axes = metric.plot()
    assert isinstance(figure, sys.modules["matplotlib.figure"].Figure)
import torchmetrics.utilities.plot, torch.utils.flop_counter
assert torchmetrics.utilities.plot.__file__ and torch.utils.flop_counter.flop_registry
assert not compiler()
"""
COMPILES = """
traced = []
def backend(graph, inputs): traced.append(graph); return graph.forward
def step(x):
    module(x).sum().backward(); sgd.step(); sgd.zero_grad()
optimized = torch.compile(module, backend=backend)
assert compiler() and isinstance(optimized, torch._dynamo.OptimizedModule)
assert torch.equal(optimized(torch.ones(1, 2)), module(torch.ones(1, 2))) and traced
torch.compile(step, backend=backend)(torch.ones(1, 2))
assert to_uncompiled(optimized) is module
assert torch.compile(lambda x: apart(x + 1), backend=backend)(torch.ones(1)) is False
assert torch.compile(lambda x: x * len(sgd.state_dict()), backend=backend)(torch.ones(1)) == 2
from torchvision.ops import roi_align
roi_align(torch.ones(1, 1, 4, 4), [torch.tensor([[0.0, 0, 2, 2]])], 2)
import torch._dynamo.utils
assert torch._dynamo.utils.__spec__.origin
"""


@SLOW
def test_deferred_modules_work_when_used():
    """Plots and the FLOP counter work without torch's compiler; `torch.compile` imports it."""
    in_a_new_process(EAGER + PLOTS + COMPILES)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept():
    code = """
import resource
import numpy as np
from app.system.program import set_up
set_up()
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(2**24)
before = faults()
np.ones(2**24)  # 32,768 pages
assert faults() - before < 100
"""
    in_a_new_process(code)


@SLOW
def test_an_offline_run_imports_little_of_wandb(tmp_path):
    code = f"""
from app.system.program import set_up
set_up()
import sys
from app.monitor.loggers import Tracker
tracker = Tracker({str(tmp_path)!r}, "offline")
tracker.experiment.summary.update({{"names": ["a"], "none": None}})
assert not {{"pandas", "wandb.sdk.launch.agent"}} & set(sys.modules)
tracker.finish()
import pandas, wandb
assert wandb.util.is_pandas_data_frame(pandas.DataFrame())
assert not wandb.util.is_pandas_data_frame(["a"])
from wandb.sdk.launch.inputs.internal import StagedLaunchInputs
from wandb.sdk.launch import load_wandb_config, manage_config_file
assert "wandb.sdk.launch.agent" in sys.modules and load_wandb_config.__doc__
assert manage_config_file.__module__ == "wandb.sdk.launch.inputs.manage"
"""
    in_a_new_process(code)


@SLOW
def test_submodule_of_compiler_is_imported_first():
    code = """
from app.system.program import set_up
set_up()
import torch._dynamo.config
import torch._dynamo.config as config
assert torch._dynamo.config is config and config.__spec__.origin and config.verbose is False
"""
    in_a_new_process(code)


@SLOW
def test_imports_have_no_side_effects():
    code = """
import os, logging, sys, warnings
def state():
    level = logging.getLogger("matplotlib").level
    return dict(os.environ), [*sys.meta_path], [*warnings.filters], level
import torch, torchvision, torchmetrics, lightning.pytorch.cli, wandb
before = state()
import app, app.modules, app.data, app.training, app.lab.verify
assert state() == before
import torch._dynamo.config
assert torch._dynamo.config.verbose is False
"""
    in_a_new_process(code)
