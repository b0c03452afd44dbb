"""Choice of where a rank's images lie, and of its number of worker processes."""

import os
from typing import Literal

import psutil
import torch
from lightning import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from app.system.machine import usable_cores

Placement = Literal["disk", "memory", "device"]


def _local_ranks(trainer: Trainer) -> int:
    return max(trainer.world_size // trainer.num_nodes, 1)


def place(trainer: Trainer, size: int, mapped: bool) -> Placement:
    """Choose the placement of images, the same on all ranks. Collective.

    Args:
        trainer: The trainer.
        size: Bytes of the images.
        mapped: Whether the ranks of a node share the images' memory.
    """
    strategy = trainer.strategy
    needed = size
    if not mapped:
        needed *= _local_ranks(trainer)
    fits = needed < psutil.virtual_memory().available / 2
    if not strategy.reduce_boolean_decision(fits, all=True):
        return "disk"
    if strategy.root_device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(strategy.root_device)
        # one decision for all ranks, because the ranks' free GPU memory may differ
        if strategy.reduce_boolean_decision(size < free / 10, all=True):
            return "device"
    return "memory"


def workers_of(trainer: Trainer) -> int:
    """Return a rank's number of worker processes.

    This is SLURM's number of cores per task. Without such a number, it is an equal share of the
    node's usable cores.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and "SLURM_CPUS_PER_TASK" in os.environ:
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    return max(usable_cores() // _local_ranks(trainer), 1)
