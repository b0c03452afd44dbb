"""Strategies that distribute training over devices and processes. Importing this package registers their names."""

import atexit

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from app.parallel.comm_hooks import BF16, FP16, PowerSGD, Ring
from app.parallel.data_parallel import DataParallelStrategy, SplitForward
from app.parallel.ddp import DDP, Hybrid

__all__ = ["BF16", "DDP", "FP16", "DataParallelStrategy", "Hybrid", "PowerSGD", "Ring", "SplitForward"]

for name, entry in StrategyRegistry.items():
    if entry["strategy"] is DDPStrategy:
        StrategyRegistry.register(name, DDP, override=True, **entry["init_params"])
for cls in (DataParallelStrategy, FP16, BF16, PowerSGD, Ring, Hybrid):
    StrategyRegistry.register(cls.strategy_name, cls, override=True)


@atexit.register
def _end_process_group() -> None:
    """Destroy the process group before Python exits, because gloo's threads sometimes abort an exiting process.

    Source: https://github.com/pytorch/pytorch/pull/179291. Lightning does this only for its own NCCL group.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
