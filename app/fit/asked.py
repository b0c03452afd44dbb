"""What was asked for, and what started the process: all that a rule looks at; and what a rule is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jsonargparse import Namespace
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import ParallelStrategy

from app.data import ImageData
from app.fit.devices import (
    accelerator_name,
    class_of,
    follow,
    processes_per_node,
    strategy_class,
    strategy_options,
)
from app.launch.cluster_environment import Launched, other_launcher
from app.modules import ImageClassifier

Found = Mapping[str, Any] | bool | None


class Rule(NamedTuple):
    """One way in which a run cannot work.

    Attributes:
        broken: Whether it is so: true, or fields of the texts beside `s`, which is what the rule was asked about.
        message: What is wrong, with the flag and its value.
        remedy: What to do instead.
    """

    broken: Callable[[Any], Found]
    message: str
    remedy: str


@dataclass(frozen=True)
class Asked:
    """What was asked for, and what started the process: all that a rule looks at.

    Attributes:
        command: The command: `fit`, `test`, ….
        config: Its resolved configuration.
        launcher: What started this process as one of several.
        environ: The environment.
    """

    command: str
    config: Namespace
    launcher: Launched | None
    environ: Mapping[str, str]

    @cached_property
    def checked(self) -> Namespace:
        """The configuration, without the arguments of the user's own model and data classes: they have no limits."""
        config = self.config.clone()
        for section, base in (("model", ImageClassifier), ("data", ImageData)):
            if not issubclass(class_of(config.get(section)) or object, base):
                config.pop(f"{section}.init_args", None)
        return config

    @cached_property
    def trainer(self) -> Namespace:
        """Section `trainer`, with the launcher's numbers where none were given."""
        return follow(self.config.trainer, self.launcher)

    @cached_property
    def strategy(self) -> Any:
        """The strategy's class; its class attributes say what it is."""
        return strategy_class(self.trainer)

    @cached_property
    def name(self) -> str:
        """The strategy's name."""
        flag = self.trainer.strategy
        return flag if isinstance(flag, str) else getattr(self.strategy, "strategy_name", self.strategy.__name__)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the strategy, as far as they are known before it is made."""
        return strategy_options(self.trainer)

    @cached_property
    def model(self) -> type | None:
        """The model's class, if it is of this application."""
        cls = class_of(self.config.model)
        return cls if cls is not None and issubclass(cls, ImageClassifier) else None

    def given(self, flag: str) -> Any:
        """The value of a flag of our models; None where the model has none of this name."""
        return self.config.model.get(f"init_args.{flag}") if self.model else None

    @property
    def micro_batch(self) -> int | str | None:
        """`--data.micro_batch`, where the data is of this application."""
        cls = class_of(self.config.data)
        return self.config.data.get("init_args.micro_batch") if cls and issubclass(cls, ImageData) else None

    @property
    def compiled(self) -> bool:
        """Whether the network is to be compiled."""
        return self.given("compile") not in (None, False, "off")

    @property
    def hook(self) -> Callable | None:
        """The communication hook."""
        return getattr(self.strategy, "fixed_hook", None) or self.options.get("ddp_comm_hook")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.trainer.num_nodes

    @cached_property
    def processes(self) -> int:
        """Processes of each node."""
        return processes_per_node(self.trainer)

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes if issubclass(self.strategy, ParallelStrategy) else 1

    @property
    def processes_meet(self) -> bool:
        """Whether the strategy is of several processes, were there more devices or nodes."""
        return not getattr(self.strategy, "single_process", False)

    @cached_property
    def device(self) -> str:
        """The type of the devices."""
        return accelerator_name(self.trainer)

    @cached_property
    def plugins(self) -> list[type]:
        """Classes of the plugins that were asked for."""
        given = self.trainer.plugins
        return [cls for each in (given if isinstance(given, list) else [given]) if (cls := class_of(each))]

    @property
    def sync_batchnorm(self) -> bool:
        """Whether it was asked for, by flag or as a plugin."""
        return self.trainer.sync_batchnorm or any(issubclass(plugin, LayerSync) for plugin in self.plugins)

    @property
    def stands_alone(self) -> bool:
        """Whether a person has started this process: no launcher, and no plugin of theirs."""
        others = any(issubclass(plugin, ClusterEnvironment) for plugin in self.plugins)
        return self.launcher is None and not others

    @property
    def other_launcher(self) -> bool:
        """Whether Lightning knows a launcher that we do not."""
        return self.config.cluster.init_method is None and other_launcher()

    @property
    def nodes_meet(self) -> bool:
        """Whether several nodes find each other by `--cluster`."""
        return self.stands_alone and self.nodes > 1 and self.processes_meet and not self.other_launcher
