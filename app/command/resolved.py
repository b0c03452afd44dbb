"""Resolved configuration: strategy, devices, processes and launcher, without a Trainer."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import (
    Accelerator,
    AcceleratorRegistry,
    CUDAAccelerator,
    MPSAccelerator,
)
from lightning.pytorch.strategies import (
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)

from app.data import ImageData
from app.errors import UserError
from app.launch.cluster_environment import Launched
from app.modules import ImageClassifier


def class_of(section: Any) -> type | None:
    """Return the class of a section's `class_path`, or None."""
    path = getattr(section, "class_path", None)
    return pkgutil.resolve_name(path) if path else None


def as_list(value: Any) -> list[Any]:
    """Wrap a value in a list; return a list unchanged, and an empty list for None."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Resolved:
    """Configuration with everything derived from it and from this process's launcher.

    Attributes:
        config: Configuration with all defaults.
        command: Name of the command: `fit`, `test`, ….
        launcher: Launcher that started this process, or None.
    """

    config: Namespace
    command: str = "fit"
    launcher: Launched | None = None

    # -- strategy

    @cached_property
    def strategy(self) -> type[Strategy]:
        """The strategy's class; for `auto`, Lightning's choice.

        Raises:
            KeyError: When `--trainer.strategy` is an unknown name.
        """
        flag = self.trainer.strategy
        cls = class_of(flag)
        if cls:
            return cls
        if flag == "auto":
            flag = SingleDeviceStrategy.strategy_name
            if self.trainer.num_nodes > 1 or self.devices > 1:
                flag = "ddp"
        return StrategyRegistry[flag.lower()]["strategy"]

    @property
    def single_process(self) -> bool:
        """Whether all devices belong to one process, as under `dp`."""
        return getattr(self.strategy, "single_process", False)

    @cached_property
    def name(self) -> str:
        """The strategy's name."""
        flag = self.trainer.strategy
        if isinstance(flag, str):
            return flag
        return getattr(self.strategy, "strategy_name", self.strategy.__name__)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The strategy's options: configured, or implied by a name such as `ddp_spawn`."""
        flag = self.trainer.strategy
        if isinstance(flag, str):
            # `StrategyRegistry.get` would create the strategy
            return StrategyRegistry[flag]["init_params"] if flag in StrategyRegistry else {}
        return vars(flag.get("init_args") or Namespace())

    @property
    def hook(self) -> Callable | None:
        """The communication hook, or None."""
        return getattr(self.strategy, "fixed_hook", None) or self.options.get("ddp_comm_hook")

    # -- devices and processes

    @cached_property
    def accelerator(self) -> str:
        """The accelerator's name, with `auto` and `gpu` resolved: `cpu`, `cuda`, `mps`, …."""
        flag = self.config.trainer.accelerator
        if flag in ("auto", "gpu"):
            if MPSAccelerator.is_available():
                return "mps"
            if flag == "gpu" or CUDAAccelerator.is_available():
                return "cuda"
            return "cpu"
        cls: Any = class_of(flag)
        return cls.name() if cls else flag

    @cached_property
    def accelerator_class(self) -> type[Accelerator] | None:
        """Lightning's class of the accelerator, or None for an unknown name."""
        if self.accelerator in AcceleratorRegistry:
            return AcceleratorRegistry[self.accelerator]["accelerator"]
        return class_of(self.trainer.accelerator)

    @cached_property
    def devices(self) -> int:
        """Number of devices per node.

        On a single node, this is 1 if strategy and devices are both `auto`. Otherwise, Lightning's
        rules apply.

        Raises:
            UserError: When `devices` is neither a count nor a list.
        """
        trainer = self.trainer
        text = str(trainer.devices).strip()
        if text == "auto" and trainer.strategy == "auto" and trainer.num_nodes == 1:
            return 1
        if text in ("auto", "-1"):
            cls = self.accelerator_class
            return max(cls.auto_device_count(), 1) if cls else 1
        count = 0
        if isinstance(trainer.devices, list) or "," in text:
            count = len(text.strip("[],").split(","))
        elif text.isdecimal():
            count = int(text)
        if count < 1:
            raise UserError(
                f"--trainer.devices {trainer.devices}: give a count from 1 on, a list such as "
                "0,1, or auto"
            )
        return count

    @property
    def replicas(self) -> int:
        """Number of devices on all nodes."""
        return self.devices * self.nodes

    @cached_property
    def trainer(self) -> Namespace:
        """Section `trainer`; missing numbers of devices and nodes come from the launcher."""
        trainer = self.config.trainer.clone()
        if self.launcher is not None:
            if trainer.devices == "auto":
                trainer.devices = self.launcher.per_node or self.launcher.world_size
            if trainer.num_nodes == 1:
                trainer.num_nodes = self.launcher.nodes
            if self.live:  # each rank is a node with one device, and sees no other
                trainer.devices = 1
        return trainer

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.trainer.num_nodes

    @cached_property
    def processes(self) -> int:
        """Number of processes per node."""
        if not issubclass(self.strategy, ParallelStrategy):
            return 1
        return self.devices

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return self.nodes * self.processes

    @property
    def spawns(self) -> bool:
        """Whether the strategy starts its processes itself, by spawn or fork."""
        return self.options.get("start_method", "popen") != "popen"

    @cached_property
    def agent_processes(self) -> int:
        """Number of ranks that this process starts as its node's agent.

        It is 0 if the run has one rank, or if a launcher, a cluster plugin or the strategy starts
        the ranks.
        """
        is_parallel = self.world_size > 1 or self.live
        is_agent = self.stands_alone and not self.spawns and is_parallel
        return self.processes if is_agent else 0

    # -- launcher

    @property
    def live(self) -> bool:
        """Whether ranks may come and go."""
        return self.command == "fit" and self.config.cluster.live

    @property
    def stands_alone(self) -> bool:
        """Whether the process runs without a launcher and without a cluster plugin."""
        plugins = map(class_of, as_list(self.trainer.plugins))
        return self.launcher is None and not any(
            issubclass(plugin or object, ClusterEnvironment) for plugin in plugins
        )

    # -- model and data

    @cached_property
    def checked(self) -> Namespace:
        """The configuration, without the arguments of model or data classes unknown to the rules.

        The rules know only subclasses of `ImageClassifier` and `ImageData`.
        """
        config = self.config.clone()
        for section, base in (("model", ImageClassifier), ("data", ImageData)):
            if not issubclass(class_of(config.get(section)) or object, base):
                config.pop(f"{section}.init_args", None)
        return config

    def given(self, flag: str) -> Any:
        """Return the value of a model or data flag such as `data.batch_size`.

        Return None if the class lacks this flag, or is no `ImageClassifier` or `ImageData`.
        """
        section, _, name = flag.partition(".")
        return self.checked[section].get(f"init_args.{name}")

    @property
    def virtual_devices(self) -> int | None:
        """Value of `--run.virtual_devices`, or None."""
        count = self.config.run.virtual_devices
        # a plain int, because checkpoints hold only plain values
        return count and int(count)

    @property
    def compiled(self) -> bool:
        """Whether the network is compiled."""
        return self.given("model.compile") not in (None, False, "off")

    @property
    def reduces_overhead(self) -> bool:
        """Whether the network is compiled to CUDA graphs."""
        return self.given("model.compile") == "reduce-overhead"
