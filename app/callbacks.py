"""Callbacks that show what a run does: batch shapes, predictions, test figures."""

import csv
import io
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from app.data.batches import GlobalBatches
from app.data.module import ImageData
from app.errors import UserError
from app.launch.agree import gather_objects
from app.modules import ImageClassifier
from app.monitor.loggers import Tracker
from app.parallel import SplitForward
from app.system.files import whole


class BatchShapes(Callback):
    """Prints what every replica got and what came out, once per distinct shape.

    Under `dp` also what was gathered from the replicas. Shows how a global batch is split, and that the last
    one of an epoch is smaller. Rank zero prints what all ranks have seen: with several of them, when an epoch ends.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()
        self._new: list[tuple[str, ...]] = []  # seen, and not yet printed
        self._replicas: dict[int, tuple[list[int], list[int]]] = {}
        self._handles: list[Any] = []

    def _watch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def on_replica(replica: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._replicas[replica.index] = _shapes(args, kwargs, output)

        def on_module(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.ndim:
                return  # DDP sends the whole training step through here, too
            gathered = bool(self._replicas)
            shapes = _shapes(args, kwargs, output)
            replicas = self._replicas or {0: shapes}
            lines = [
                f"rank {trainer.global_rank}, replica {index}: input {given} -> output {made}"
                for index, (given, made) in sorted(replicas.items())
            ]
            if gathered:
                lines.append(f"gathered: {shapes[1]}")
            self._replicas = {}
            if tuple(lines) not in self._seen:
                self._seen.add(tuple(lines))
                self._new.append(tuple(lines))
                if trainer.world_size == 1:
                    self._print(trainer)

        self._handles = [pl_module.register_forward_hook(on_module, with_kwargs=True)]
        if isinstance(trainer.strategy, SplitForward):
            assert trainer.strategy.replica is not None
            self._handles.append(trainer.strategy.replica.register_forward_hook(on_replica, with_kwargs=True))

    def _print(self, trainer: Trainer, pl_module: LightningModule | None = None) -> None:
        """Print what is new on any rank, in order of rank. Collective."""
        for lines in (lines for rank in gather_objects(self._new) for lines in rank):
            if trainer.is_global_zero:
                print("\n".join(lines), flush=True)
        self._new = []

    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _print

    on_fit_start = on_test_start = on_predict_start = _watch

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch, unless fit has."""
        if not self._handles:
            self._watch(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        if not self._seen:
            rank_zero_warn(f"BatchShapes saw nothing: {type(pl_module).__name__} never calls self(batch) in its step")
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _shapes(args: Any, kwargs: Any, output: Any) -> tuple[list[int], list[int]]:
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), output)
    return list(given.shape), list(output.shape)


class PredictionWriter(Callback):
    """Writes `predictions.csv` into the run's directory: each image once, in order, under every world size."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, float]] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep index, predicted label and probability of this rank's images."""
        loader = trainer.predict_dataloaders
        if isinstance(pl_module, ImageClassifier) and isinstance(loader, GlobalBatches):
            probability, label = outputs.max(1)
            self._rows += zip(loader.samples(batch_idx).tolist(), label.tolist(), probability.tolist(), strict=True)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the rows of every rank and write them."""
        rows = sorted(row for part in gather_objects(self._rows) for row in part)
        self._rows = []
        directory = trainer.log_dir
        if not trainer.is_global_zero or not rows or directory is None:
            return
        data, loader = trainer.datamodule, trainer.predict_dataloaders  # type: ignore[attr-defined]
        assert isinstance(data, ImageData)
        assert isinstance(loader, GlobalBatches)
        path = Path(directory, "predictions.csv")
        files, labels = loader.split.names, loader.split.labels.tolist()
        known = min(labels) >= 0
        lines = [["file" if files else "index", "predicted", "name", "probability", *["label"] * known]]
        for index, predicted, probability in rows:
            line = [files[index] if files else index, predicted, data.class_names[predicted], f"{probability:.6f}"]
            lines.append(line + [labels[index]] * known)
        try:
            _write_table(path, lines)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): give another --run.root") from error
        rank_zero_info(f"{len(rows):,} prediction{'s' * (len(rows) > 1)}: {path}")


class TestFigures(Callback):
    """Draws the confusion matrix and the most confidently wrong test images, for the directory and the tracker.

    Args:
        wrong: How many of the wrong images to show.
        track: Whether the tracker also gets the wrong images.
    """

    __test__ = False  # not for pytest

    def __init__(self, wrong: int = 25, track: bool = False) -> None:
        self.wrong, self.track = wrong, track
        self._worst: list[tuple[float, int, int, int]] = []  # confidence, row, predicted, label

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the most confidently wrong images of this rank."""
        loader = trainer.test_dataloaders
        if not isinstance(pl_module, ImageClassifier) or not isinstance(loader, GlobalBatches):
            return
        confidence, predicted = outputs.max(1)
        at = (predicted != batch[1]).nonzero().flatten()
        rows = loader.samples(batch_idx).to(at.device)
        found = zip(*(t[at].tolist() for t in (confidence, rows, predicted, batch[1])), strict=True)
        self._worst = sorted([*self._worst, *found], reverse=True)[: self.wrong]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the figures of every rank, draw them and hand them to the tracker."""
        data, loader = trainer.datamodule, trainer.test_dataloaders  # type: ignore[attr-defined]
        if not isinstance(pl_module, ImageClassifier) or not isinstance(loader, GlobalBatches):
            return
        assert isinstance(data, ImageData)
        matrix = torch.atleast_2d(pl_module.confusion.compute())  # of a single class it is a number
        worst = sorted((row for part in gather_objects(self._worst) for row in part), reverse=True)[: self.wrong]
        self._worst = []
        directory = trainer.log_dir
        if trainer.is_global_zero and directory is not None:
            # here, because matplotlib takes a fifth of what all imports take
            from app.monitor.report import draw_confusion_matrix, draw_most_wrong

            names = list(data.class_names)
            rows = [
                (loader.split[row], names[label], names[predicted], confidence)
                for confidence, row, predicted, label in worst
            ]
            matrix_file, wrong_file = (
                Path(directory, "confusion_matrix.png"),
                Path(directory, "most_wrong.png"),
            )
            counts = ([n, *r] for n, r in zip(names, matrix.tolist(), strict=True))
            try:
                _write_table(matrix_file.with_suffix(".csv"), [["label \\ predicted", *names], *counts])
                draw_confusion_matrix(matrix, names, matrix_file)
                draw_most_wrong(rows, wrong_file)
            except OSError as error:
                rank_zero_info(f"{directory}: the test's pictures cannot be written there ({error.strerror})")
            pictures = [path for path in (matrix_file, wrong_file)[: 1 + self.track] if path.exists()]
            for logger in trainer.loggers:
                if isinstance(logger, Tracker):
                    logger.log_test_figures(matrix.tolist(), names, rows if self.track else [], pictures)
        pl_module.confusion.reset()


def _write_table(path: Path, lines: list[list[Any]]) -> None:
    """Write a CSV file; names of files that are no UTF-8 stay what they are."""
    with whole(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        csv.writer(text).writerows(lines)
        text.flush()
        text.detach()
