"""The training step, virtual devices, strategies, communication hooks, and sums over shards."""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from app.training.comm_hooks import BF16, FP16, Ring
from app.training.data_parallel import DataParallelStrategy
from app.training.ddp import DDP

__all__ = ["BF16", "DDP", "FP16", "DataParallelStrategy", "Ring"]


def register_strategies() -> None:
    """Register names for `--trainer.strategy`; `ddp` and its variants become our own `DDP`."""
    for name, entry in StrategyRegistry.items():
        if entry["strategy"] is DDPStrategy:
            StrategyRegistry.register(name, DDP, override=True, **entry["init_params"])
    for cls in (DataParallelStrategy, FP16, BF16, Ring):
        StrategyRegistry.register(cls.strategy_name, cls, override=True)
