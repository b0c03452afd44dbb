"""Strategies: which devices and processes share the work. Importing this registers their names."""

import atexit

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from app.errors import UserError
from app.launch.cluster_environment import check_settings, launched
from app.parallel.comm_hooks import BF16, FP16, LocalSGD, PowerSGD, Ring
from app.parallel.data_parallel import DataParallelStrategy, SplitForward
from app.parallel.ddp import DDP, Hybrid
from app.system.lightning_patches import layer_sync, start_method

__all__ = ["BF16", "DDP", "FP16", "DataParallelStrategy", "Hybrid", "LocalSGD", "PowerSGD", "Ring", "SplitForward"]

for name, entry in StrategyRegistry.items():
    if entry["strategy"] is DDPStrategy:
        StrategyRegistry.register(name, DDP, entry["description"], override=True, **entry["init_params"])
for cls, description in (
    (DataParallelStrategy, "one process, N devices"),
    (FP16, "DDP that sends gradients as float16"),
    (BF16, "DDP that sends gradients as bfloat16"),
    (PowerSGD, "DDP that sends low-rank approximations of gradients"),
    (LocalSGD, "DDP that averages weights, every few steps, between nodes"),
    (Ring, "DDP with a ring all-reduce written out"),
    (Hybrid, "DDP between nodes, dp inside of each"),
):
    StrategyRegistry.register(cls.strategy_name, cls, description, override=True)


@atexit.register
def _end_process_group() -> None:
    """End gloo's threads while Python still runs: a process that exits with them now and then aborts.

    Source: https://github.com/pytorch/pytorch/pull/179291. Lightning does so for NCCL only, and only for its own.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def refuse_impossible(trainer: Trainer) -> None:
    """Refuse a way of running that its launcher or its devices cannot serve.

    Raises:
        UserError: When several processes were started for a strategy that is one, or that starts its own; or
            when SyncBatchNorm would have nothing to do, or static_graph would fail.
    """
    launcher = launched()
    if launcher is not None and start_method(trainer.strategy):
        raise UserError(
            f"ddp_spawn, ddp_fork and ddp_notebook start their own processes, which {launcher.by} has done already: "
            f"use --trainer.strategy ddp, or start without {launcher.by}"
        )
    check_settings(trainer)
    if getattr(trainer.strategy, "static_graph", False) and trainer.accumulate_grad_batches > 1:
        raise UserError(
            "--trainer.strategy.static_graph true: torch fails where gradients are accumulated: leave it out, or "
            f"--trainer.accumulate_grad_batches {trainer.accumulate_grad_batches}"
        )
    if layer_sync(trainer) is not None:
        if trainer.world_size == 1:
            raise UserError(
                "--trainer.sync_batchnorm has no effect in one process: use --trainer.strategy ddp, or leave it"
            )
        if trainer.strategy.root_device.type == "cpu":
            raise UserError("--trainer.sync_batchnorm works on GPUs only, says torch: leave it out on CPU")
