"""How many devices and processes a resolved configuration asks for, before there is a Trainer."""

import pkgutil
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins.environments import ClusterEnvironment, LSFEnvironment, MPIEnvironment
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from app.errors import UserError, one_line
from app.launch.cluster_environment import launched
from app.parallel import DDP, SplitForward


def accelerator_of(trainer: Namespace) -> Any:
    """The accelerator's class, as Lightning chooses it."""
    named = {"cpu": CPUAccelerator, "cuda": CUDAAccelerator, "mps": MPSAccelerator}
    if trainer.accelerator in named:
        return named[trainer.accelerator]
    there = [kind for kind in (MPSAccelerator, CUDAAccelerator) if kind.is_available()]
    return [CPUAccelerator, *there][-1]


def devices_per_node(trainer: Namespace) -> int:
    """Devices of each node.

    Raises:
        UserError: When the accelerator does not have them.
    """
    accelerator = accelerator_of(trainer)
    if trainer.devices == "auto":
        one = trainer.strategy == "auto" and trainer.num_nodes == 1  # several only when they are asked for
        return 1 if one else accelerator.auto_device_count()
    try:
        devices = accelerator.parse_devices(trainer.devices)
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(one_line(str(error))) from error
    return devices if isinstance(devices, int) else len(devices or [])


def strategy_of(trainer: Namespace) -> tuple[type, dict[str, Any]]:
    """The strategy's class and its settings, as Lightning chooses it."""
    strategy = trainer.strategy
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        entry = StrategyRegistry[strategy]
        return entry["strategy"], entry["init_params"]
    if strategy == "auto":
        return DDP if trainer.num_nodes * devices_per_node(trainer) > 1 else object, {}
    found = pkgutil.resolve_name(str(getattr(strategy, "class_path", strategy)))
    return found, dict(getattr(strategy, "init_args", None) or {})


def agent_processes(config: Namespace) -> int:
    """Ranks of this node for which this process is to be the agent; 0 where another process is, or there is one."""
    trainer, cluster = config.trainer, config.cluster
    plugins = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
    paths = [str(getattr(plugin, "class_path", plugin)) for plugin in plugins if plugin]
    if any(issubclass(pkgutil.resolve_name(path), ClusterEnvironment) for path in paths if "." in path):
        return 0
    if launched() is not None or (cluster.init_method is None and (LSFEnvironment.detect() or MPIEnvironment.detect())):
        return 0
    strategy, settings = strategy_of(trainer)
    if not issubclass(strategy, ParallelStrategy) or (settings.get("start_method") or "popen") != "popen":
        return 0
    processes = 1 if issubclass(strategy, SplitForward) else devices_per_node(trainer)
    return processes if processes * trainer.num_nodes > 1 else 0
