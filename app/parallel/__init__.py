"""Strategies: which devices and processes share the work. Importing this registers their names."""

import atexit

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from app.errors import UserError
from app.parallel.data_parallel import DataParallelStrategy
from app.parallel.environment import check_settings, launched

if DataParallelStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        DataParallelStrategy.strategy_name, DataParallelStrategy, description="one process, N devices"
    )


@atexit.register
def _end_gloo() -> None:
    """End gloo's threads while Python still runs: a process that exits with them now and then aborts.

    Source: https://github.com/pytorch/pytorch/pull/179291. Lightning does so for NCCL only.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def refuse_impossible(trainer: Trainer) -> None:
    """Refuse a way of running that its launcher or its devices cannot serve.

    Raises:
        UserError: When several processes were started for a strategy that is one, or that starts its own; or
            when SyncBatchNorm would have nothing to do.
    """
    launcher = launched()
    if launcher is not None and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise UserError(
            f"ddp_spawn, ddp_fork and ddp_notebook start their own processes, which {launcher.by} has done already: "
            f"use --trainer.strategy ddp, or start without {launcher.by}"
        )
    check_settings(trainer)
    if trainer._accelerator_connector._layer_sync is not None:
        if trainer.world_size == 1:
            raise UserError(
                "--trainer.sync_batchnorm has no effect in one process: use --trainer.strategy ddp, or leave it"
            )
        if trainer.strategy.root_device.type == "cpu":
            raise UserError("--trainer.sync_batchnorm works on GPUs only, says torch: leave it out on CPU")
