"""Variant of a training: flags of `fit`, their resolved configuration, and its commands."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from jsonargparse import Namespace

from app.command.configuration import resolve
from app.command.resolved import Resolved
from app.errors import UserError
from app.lab.runs import on_nodes, typed
from app.system.machine import usable_cores

# flags that `compare` and `verify` set themselves
RESERVED = (
    "run.root",
    "run.name",
    "run.warmup_epochs",
    "run.test",
    "run.wandb",
    "run.group",
    "run.on_nonfinite",
    "run.on_divergence",
    "cluster.init_method",
    "cluster.node_rank",
)


@dataclass
class Variant:
    """Configuration to run.

    Attributes:
        name: Name in reports.
        arguments: Arguments of `python -m app`, beginning with `fit`.
        settings: Resolved configuration with defaults.
        lacking: Description of the devices that this machine lacks for the variant, or None.
    """

    name: str
    arguments: list[str]
    settings: Namespace
    lacking: str | None = None

    @classmethod
    def of_flags(
        cls, name: str, flags: Mapping[str, Any], configs: Sequence[str] = ()
    ) -> "Variant":
        """Create a variant from flags without leading dashes. Drop flags whose value is None.

        Raises:
            UserError: When `fit` rejects the flags.
        """
        # printed commands show a class before its settings
        classes = ("model", "data", "trainer.strategy")
        arguments = ["fit"]
        for config in configs:
            arguments += ["--config", config]
        for flag in sorted(flags, key=lambda flag: flag not in classes):
            if flags[flag] is not None:
                arguments += [f"--{flag}", typed(flags[flag])]
        try:
            variant = cls(name, arguments, resolve(arguments))
        except UserError as error:
            raise UserError(f"variant {name!r}: {error}") from error
        variant.lacking = _lacking(variant)
        return variant

    @property
    def slug(self) -> str:
        """Name of the variant's folder."""
        return re.sub(r"[^\w.=-]+", "_", self.name).strip("_") or "variant"

    @property
    def replicas(self) -> int:
        """Number of devices on all nodes."""
        return Resolved(self.settings).replicas

    def nodes(self) -> list[dict[str, str]]:
        """Return each node's environment variables. Nodes divide this machine's GPUs or cores."""
        resolved = Resolved(self.settings)
        count = resolved.trainer.num_nodes
        common = inherited()
        if count == 1:
            return [common]
        if "lo" in psutil.net_if_addrs():  # macOS has lo0
            common["GLOO_SOCKET_IFNAME"] = "lo"
        if resolved.accelerator != "cuda":
            share = max(usable_cores() // self.replicas, 1)
            return [{"OMP_NUM_THREADS": str(share)} | common] * count
        visible = common.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.replicas))))
        gpus = visible.split(",")
        nodes = []
        for node in range(count):
            first = node * resolved.devices
            gpus_of_node = ",".join(gpus[first : first + resolved.devices])
            nodes.append(common | {"CUDA_VISIBLE_DEVICES": gpus_of_node})
        return nodes

    def commands(self) -> str:
        """Return the commands that run the variant, one line per node."""
        lines = on_nodes(self.arguments, self.nodes(), "tcp://127.0.0.1:29500")
        return " &\n".join(map(str, lines))


def inherited() -> dict[str, str]:
    """Return the environment variables of this process that affect a run."""
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def _lacking(variant: Variant) -> str | None:
    """Return a description of missing devices, or None. Each replica needs its own GPU or core."""
    devices = {"cpu": (usable_cores(), "CPU cores"), "cuda": (torch.cuda.device_count(), "GPUs")}
    count, name = devices.get(Resolved(variant.settings).accelerator, (math.inf, ""))
    if variant.replicas > count:
        return f"needs {variant.replicas} {name}; this machine has {count}"
    return None
