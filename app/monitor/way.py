"""The way of running of a Trainer: on which devices, by which strategy, in which sizes."""

import os
from typing import Any

import torch
from lightning.pytorch import Trainer

from app.data.module import ImageData
from app.parallel import SplitForward
from app.system.lightning_patches import strategy_name


def devices_of(trainer: Trainer) -> list[torch.device]:
    """The devices of this process: several only under dp and ddp_dp."""
    strategy = trainer.strategy
    if isinstance(strategy, SplitForward):
        return strategy.parallel_devices
    return [strategy.root_device]


def way_of_running(trainer: Trainer) -> dict[str, Any]:
    """What the run record says of it: strategy, devices, sizes, precision, placement."""
    data = getattr(trainer, "datamodule", None)
    own = data if isinstance(data, ImageData) else None
    return {
        "strategy": strategy_name(trainer),
        "devices": len(getattr(trainer.strategy, "parallel_devices", None) or [0]),
        "num_nodes": trainer.num_nodes,
        "world_size": trainer.world_size,
        "precision": trainer.precision,
        "placement": own and own.placement,
        "threads": torch.get_num_threads(),
        "global_batch_size": own and own.global_batch_size,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "seed": int(os.environ["PL_GLOBAL_SEED"]) if "PL_GLOBAL_SEED" in os.environ else None,
    }
