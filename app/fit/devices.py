"""How many devices and processes a resolved configuration asks for, and of which strategy: no Trainer is needed."""

import pkgutil
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry, MPSAccelerator
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry

from app.errors import UserError
from app.launch.cluster_environment import Launched, launched, other_launcher
from app.system.lightning_patches import default_accelerator


def class_of(chosen: Any) -> type | None:
    """The class that a section of the configuration names, with `class_path`; None where it names none."""
    path = getattr(chosen, "class_path", None)
    return pkgutil.resolve_name(path) if path else None


def accelerator_name(trainer: Namespace) -> str:
    """The accelerator: `cpu`, `cuda`, `mps`, or what else was asked for, with `auto` and `gpu` resolved."""
    flag = trainer.accelerator
    if flag == "auto":
        return default_accelerator()
    if flag == "gpu":
        return "mps" if MPSAccelerator.is_available() else "cuda"
    cls: Any = class_of(flag)
    return flag if cls is None else cls.name()


def accelerator_class(trainer: Namespace) -> type[Accelerator] | None:
    """Lightning's class of the accelerator; None where there is none of this name."""
    name = accelerator_name(trainer)
    return AcceleratorRegistry[name]["accelerator"] if name in AcceleratorRegistry else class_of(trainer.accelerator)


def devices_per_node(trainer: Namespace) -> int:
    """Devices on each node as Lightning reads the flags; no accelerator is touched, and none need be there.

    Args:
        trainer: Section `trainer` of a resolved configuration.

    Raises:
        UserError: When `devices` is no count and no list.
    """
    flag = trainer.devices
    text = str(flag).strip()
    if text == "auto" and trainer.strategy == "auto" and trainer.num_nodes == 1:
        return 1  # several only when they are asked for
    if text in ("auto", "-1"):
        accelerator = accelerator_class(trainer)
        return max(accelerator.auto_device_count(), 1) if accelerator else 1
    if isinstance(flag, list) or "," in text:
        return len(flag if isinstance(flag, list) else [part for part in text.split(",") if part.strip()])
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--trainer.devices {flag}: give a count from 1 on, a list such as 0,1, or auto")
    return int(text)


def strategy_class(trainer: Namespace) -> type[Strategy]:
    """The strategy's class; for `auto` the one that Lightning takes.

    Raises:
        KeyError: When no strategy has this name.
    """
    flag = trainer.strategy
    if cls := class_of(flag):
        return cls
    if flag == "auto":
        several = trainer.num_nodes > 1 or devices_per_node(trainer) > 1
        flag = "ddp" if several else SingleDeviceStrategy.strategy_name
    return StrategyRegistry[flag.lower()]["strategy"]


def strategy_options(trainer: Namespace) -> dict[str, Any]:
    """The strategy's options, as far as they are known before it is made."""
    flag = trainer.strategy
    if isinstance(flag, str):
        return StrategyRegistry[flag]["init_params"] if flag in StrategyRegistry else {}
    return vars(flag.get("init_args") or Namespace())


def processes_per_node(trainer: Namespace) -> int:
    """Processes on each node: one for each device, unless the strategy has several devices in a process."""
    cls: Any = strategy_class(trainer)
    if not issubclass(cls, ParallelStrategy):
        return 1
    return getattr(cls, "processes_per_node", None) or devices_per_node(trainer)


def agent_processes(config: Namespace) -> int:
    """Ranks of this node that this process is to start as their agent; 0 where another one has, or there is one rank.

    Args:
        config: A resolved configuration.
    """
    trainer, cluster = config.trainer, config.cluster
    plugins = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins]
    if any(issubclass(class_of(plugin) or object, ClusterEnvironment) for plugin in plugins):  # the user's own
        return 0
    if launched() is not None or (cluster.init_method is None and other_launcher()):
        return 0
    starts_its_own = strategy_options(trainer).get("start_method", "popen") != "popen"
    if starts_its_own or not issubclass(strategy_class(trainer), ParallelStrategy):
        return 0
    processes = processes_per_node(trainer)
    return processes if processes * trainer.num_nodes > 1 else 0


def follow(trainer: Namespace, launcher: Launched | None) -> Namespace:
    """Section `trainer` with the numbers of a launcher where none were given.

    A strategy of several devices in a process keeps its `devices`: a launcher counts processes.
    """
    followed = trainer.clone()
    if launcher is None:
        return followed
    if trainer.devices == "auto" and not hasattr(strategy_class(trainer), "processes_per_node"):
        followed.devices = launcher.per_node or launcher.world_size
    if trainer.num_nodes == 1:
        followed.num_nodes = launcher.nodes
    return followed


def replicas(trainer: Namespace) -> int:
    """Devices that share a global batch, over all nodes."""
    return devices_per_node(trainer) * trainer.num_nodes
