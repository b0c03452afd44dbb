"""Callback for `--run.balance`: fewer shards for slow ranks."""

from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.data.global_order import order_of
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
        """Redistribute the shards if that shortens a step. The loader starts after this hook, with the new shares."""
        loop = trainer.fit_loop.epoch_loop
        order = order_of(trainer.train_dataloader)
        if not isinstance(loop, ShardedLoop) or loop.sums is None or order is None:
            return
        self.ranks.share(trainer, [])  # finish the exchange of the last window's times
        tree = loop.sums.tree
        rows = self.ranks.ranks
        if not rows:
            return
        seconds = [
            (row.data + row.compute) / share for row, share in zip(rows, tree.shares, strict=True)
        ]
        shares = balanced(seconds, tree.count)
        if slowest(seconds, shares) > GAIN * slowest(seconds, tree.shares):
            return
        tree.deal(shares)
        order.deal(shares)
        self.ranks.forget()
        rank_zero_info(
            f"shards  {', '.join(map(str, shares))} of {tree.count} on ranks 0 to {len(shares) - 1}"
        )


def balanced(seconds: Sequence[float], count: int) -> list[int]:
    """Distribute shards so that the slowest rank finishes as early as possible, and each rank has at least one.

    Args:
        seconds: Seconds per shard of each rank.
        count: Number of shards.

    Returns:
        Number of shards of each rank.
    """
    shares = [1] * len(seconds)
    for _ in range(count - len(shares)):
        ends = [second * (share + 1) for second, share in zip(seconds, shares, strict=True)]
        shares[ends.index(min(ends))] += 1
    return shares


def slowest(seconds: Sequence[float], shares: Sequence[int]) -> float:
    """Return the slowest rank's step time: its seconds per shard times its number of shards."""
    return max(second * share for second, share in zip(seconds, shares, strict=True))
