"""Callback that shows how a batch is split, for a run in this folder or with PYTHONPATH=notebooks:

python -m app fit … --trainer.callbacks+=batch_shapes.BatchShapes
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from app.data.batches import tensors
from app.launch.agree import gather_objects
from app.training import DataParallelStrategy


class BatchShapes(Callback):
    """Callback that prints the shapes of each replica's input and output, when they are new.

    The shapes show how a global batch is split. Under `dp`, another line shows the gathered output.
    Rank zero prints all ranks' new shapes at the end of each epoch.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()
        self._new: list[str] = []  # lines to print
        self._replicas: dict[int, str] = {}  # shapes of each replica
        self._handles: list[Any] = []

    def _watch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the forward hooks, unless they are registered already."""
        if self._handles:
            return

        def on_replica(replica: Any, args: Any, output: Any) -> None:
            self._replicas[replica.index] = _shapes(args, output)

        def on_module(module: Any, args: Any, output: Any) -> None:
            # under DDP, Lightning calls `training_step` through the module's forward pass; skip its
            # output, a loss
            if not isinstance(output, Tensor) or not output.ndim:
                return
            shapes = self._replicas or {0: _shapes(args, output)}
            rank = trainer.global_rank
            lines = []
            for index in sorted(shapes):
                lines.append(f"rank {rank}, replica {index}: {shapes[index]}")
            if self._replicas:
                lines.append(f"gathered: {list(output.shape)}")
            self._replicas = {}
            if tuple(lines) not in self._seen:
                self._seen.add(tuple(lines))
                self._new += lines

        self._handles = [pl_module.register_forward_hook(on_module)]
        if isinstance(trainer.strategy, DataParallelStrategy):
            assert trainer.strategy.replica is not None
            self._handles.append(trainer.strategy.replica.register_forward_hook(on_replica))

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _watch

    def _print(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print new shapes of all ranks, in order of rank. Collective."""
        for lines in gather_objects(self._new):
            if trainer.is_global_zero and lines:
                print("\n".join(lines), flush=True)
        self._new = []

    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _print

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks, and warn if they saw no batch."""
        if not self._seen:
            rank_zero_warn(
                f"BatchShapes saw no batch: {type(pl_module).__name__} never calls self(batch)"
            )
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _shapes(args: Any, output: Tensor) -> str:
    first, *_ = [*tensors(args), output]
    return f"input {list(first.shape)} -> output {list(output.shape)}"
