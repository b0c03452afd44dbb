"""Variant of a training: flags of `fit`, their resolved configuration, and the commands that run it here."""

import itertools
import json
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
from app.lab.runs import on_nodes
from app.system.machine import usable_cores

# flags that `compare` and `verify` set themselves
RESERVED = (
    *(
        "run.root",
        "run.name",
        "run.warmup_epochs",
        "run.test",
        "run.wandb",
        "run.group",
        "run.on_nonfinite",
    ),
    *("cluster.init_method", "cluster.node_rank"),
)
INHERITED = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)  # environment variables that affect a run


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
        """Create a variant from flags, named without leading dashes. Drop flags whose value is None.

        Raises:
            UserError: When `fit` rejects the flags.
        """
        classes = (
            "model",
            "data",
            "trainer.strategy",
        )  # printed commands show a class before its settings
        items = [(flag, value) for flag, value in flags.items() if value is not None]
        items.sort(key=lambda item: item[0] not in classes)
        pairs = [
            *(("--config", config) for config in configs),
            *((f"--{flag}", typed(value)) for flag, value in items),
        ]
        arguments = ["fit", *itertools.chain.from_iterable(pairs)]
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
        """Return the environment variables of each node. Several nodes divide this machine's GPUs or cores."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        trainer = self.settings.trainer
        if trainer.num_nodes == 1:
            return [inherited]
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in psutil.net_if_addrs() else {}
        if Resolved(self.settings).accelerator != "cuda":
            threads = os.environ.get(
                "OMP_NUM_THREADS", str(max(usable_cores() // self.replicas, 1))
            )
            return [inherited | loopback | {"OMP_NUM_THREADS": threads}] * trainer.num_nodes
        visible = os.environ.get(
            "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.replicas)))
        ).split(",")
        count = Resolved(self.settings).devices
        starts = range(0, count * trainer.num_nodes, count)
        return [
            inherited | loopback | {"CUDA_VISIBLE_DEVICES": ",".join(visible[i : i + count])}
            for i in starts
        ]

    def commands(self, threads: int | None = None) -> str:
        """Return the commands that run the variant, one line per node.

        Args:
            threads: Value of OMP_NUM_THREADS for nodes without this variable; None adds no
                variable.
        """
        nodes = [
            {"OMP_NUM_THREADS": str(threads)} | node if threads else node for node in self.nodes()
        ]
        return " &\n".join(map(str, on_nodes(self.arguments, nodes, "tcp://127.0.0.1:29500")))


def typed(value: Any) -> str:
    """Format a value for a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _lacking(variant: Variant) -> str | None:
    """Return a description of missing devices, or None. Each replica needs its own GPU or core."""
    trainer = variant.settings.trainer
    needed = variant.replicas
    if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        return "there is no GPU"
    gpus = Resolved(variant.settings).accelerator == "cuda"
    kind, count = ("GPUs", torch.cuda.device_count()) if gpus else ("CPU cores", usable_cores())
    if trainer.accelerator in ("auto", "cpu", "gpu", "cuda") and needed > count:
        return f"needs {needed} {kind}; this machine has {count}"
    return None
