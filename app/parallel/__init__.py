"""Strategies: which devices and processes share the work. Importing this registers their names."""

import atexit

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from app.parallel.comm_hooks import BF16, FP16, LocalSGD, PowerSGD, Ring
from app.parallel.data_parallel import DataParallelStrategy, SplitForward
from app.parallel.ddp import DDP, Hybrid

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
