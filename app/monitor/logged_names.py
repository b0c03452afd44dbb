"""Check that all ranks log the same names, before Lightning adds up their values one by one."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from app.errors import UserError
from app.launch.agree import gather_objects
from app.system.patches import expects

_RESULT = "lightning.pytorch.trainer.connectors.logger_connector.result"


class LoggedNames(Callback):
    """Callback that compares the names which ranks have logged with `sync_dist`, once per epoch.

    Lightning reduces them in the order in which each rank logged them first. If ranks differ in the
    order, the callback sorts them; if a name is missing on a rank, it raises.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the names of training."""
        compare(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the names of a validation."""
        compare(trainer)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the names of a test."""
        compare(trainer)


@expects(
    "lightning.pytorch:Trainer._results", f"{_RESULT}:_ResultMetric", f"{_RESULT}:_Metadata.sync"
)
def compare(trainer: Any) -> None:
    """Bring the logged values of all ranks into one order. Collective.

    Raises:
        UserError: When some ranks have not logged a name.
    """
    if trainer.world_size == 1:
        return
    results = trainer._results
    keys = [key for key, result in results.items() if result.meta.sync.should]
    ranks = gather_objects(keys)
    if all(others == keys for others in ranks) and ranks[0] == ranks[-1]:
        return
    shared = set(keys).intersection(*ranks)
    missing = sorted(set().union(*ranks) - shared)
    if missing:
        with_it = [rank for rank, others in enumerate(ranks) if missing[0] in others]
        names = ", ".join(sorted({key.partition(".")[2] for key in missing}))
        raise UserError(
            f"only rank {', '.join(map(str, with_it))} of {trainer.world_size} logs {names} with "
            "sync_dist=True, so the ranks' values would be mixed up: log the same names on all "
            "ranks, or a torchmetrics metric"
        )
    for key in sorted(results):
        results[key] = results.pop(key)
