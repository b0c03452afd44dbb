"""Check that all ranks log the same names, before Lightning reduces their values one by one."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning import Callback, LightningModule, Trainer

from app.errors import UserError
from app.launch.agree import gather_objects
from app.record.words import listed
from app.system.patches import expects

_CONNECTORS = "lightning.pytorch.trainer.connectors.logger_connector"
_CONNECTOR = f"{_CONNECTORS}.logger_connector:_LoggerConnector"


@expects(
    "lightning.pytorch:Trainer._logger_connector",
    f"{_CONNECTOR}.epoch_end_reached",
    f"{_CONNECTOR}.update_eval_epoch_metrics",
)
class LoggedNames(Callback):
    """Callback that compares the ranks' logged names at the end of each epoch and evaluation.

    Lightning reduces values in the order in which each rank has logged them first.
    """

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Compare the names before Lightning's connector reduces the values."""
        connector = trainer._logger_connector
        if trainer.world_size == 1 or isinstance(connector.epoch_end_reached, partial):
            return
        for name in ("epoch_end_reached", "update_eval_epoch_metrics"):
            setattr(connector, name, partial(_compared, trainer, getattr(connector, name)))


def _compared(trainer: Trainer, reduce: Callable[[], Any]) -> Any:
    is_training = reduce.__name__ == "epoch_end_reached"
    if is_training == trainer.training:
        compare(trainer)
    return reduce()


@expects(
    "lightning.pytorch:Trainer._results",
    f"{_CONNECTORS}.result:_ResultMetric",
    f"{_CONNECTORS}.result:_Sync.should",
    f"{_CONNECTORS}.result:_Sync.rank_zero_only",
)
def compare(trainer: Any) -> None:
    """Bring the logged values of all ranks into one order. Collective.

    Raises:
        UserError: When some ranks have not logged a name.
    """
    results = trainer._results
    keys = []
    for key, result in results.items():
        is_synced = result.meta.sync.should or not result.is_tensor
        if is_synced and not result.meta.sync.rank_zero_only:
            keys.append(key)
    ranks = gather_objects(keys)
    if all(others == keys for others in ranks):
        return
    shared = set(keys).intersection(*ranks)
    missing = sorted(set().union(*ranks) - shared)
    if missing:
        names = sorted({key.partition(".")[2] for key in missing})
        these = [str(rank) for rank, others in enumerate(ranks) if missing[0] in others]
        raise UserError(
            f"{listed(names)}: only rank {', '.join(these)} of {len(ranks)} logs {names[0]} with "
            "sync_dist=True, so values would be mixed up: log the same names on all ranks, or a "
            "torchmetrics metric"
        )
    for key in sorted(results):
        results[key] = results.pop(key)
