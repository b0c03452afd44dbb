"""Callback for `--run.balance`: fewer shards for slow ranks."""

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.data.exact_loader import order_of
from app.monitor.rank_times import RankTimes
from app.training.virtual_devices import ShardedLoop

# redistribute the shards only if the predicted step time is at most this share of the current one
GAIN = 0.95


class Balance(Callback):
    """Callback that redistributes shards among ranks before each epoch: slow ranks get fewer.

    A shard is one of the `--run.virtual_devices` nearly equal parts of a batch. Losses and weights
    keep the same bits, because a shard's gradients do not depend on the rank that computes them.

    Args:
        ranks: Step times of all ranks, identical on every rank.
    """

    def __init__(self, ranks: RankTimes) -> None:
        self.ranks = ranks

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Redistribute the shards if that shortens a step. The loader starts after this hook."""
        loop = trainer.fit_loop.epoch_loop
        order = order_of(trainer.train_dataloader)
        rows = self.ranks.ranks
        if not rows or order is None:
            return
        assert isinstance(loop, ShardedLoop)
        tree = loop.sums.tree
        seconds = np.array([row.data + row.compute for row in rows]) / tree.shares
        shares = balanced(seconds, tree.count)
        if max(seconds * shares) > GAIN * max(seconds * tree.shares):
            return
        tree.deal(shares)
        order.deal(shares)
        self.ranks.forget()
        counts = ", ".join(map(str, shares))
        rank_zero_info(f"shards  {counts} of {tree.count} on ranks 0 to {len(shares) - 1}")


def balanced(seconds: npt.ArrayLike, count: int) -> list[int]:
    """Distribute shards, at least one per rank, so that the slowest rank finishes early.

    Args:
        seconds: Seconds per shard of each rank.
        count: Number of shards.

    Returns:
        Number of shards of each rank.
    """
    seconds = np.asarray(seconds)
    shares = np.ones(len(seconds), int)
    for _ in range(count - len(seconds)):
        shares[np.argmin(seconds * (shares + 1))] += 1
    return shares.tolist()
