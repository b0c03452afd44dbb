"""Callbacks that write results: confusion matrix, wrong images, predictions."""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info
from rich import get_console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from app.data.batches import GlobalBatches
from app.errors import printable
from app.launch.agree import gather_objects
from app.modules import ImageClassifier
from app.monitor.image_grid import draw_images
from app.monitor.loggers import trackers
from app.record.words import counted
from app.system.files import whole, write_csv

WRONG = 25  # number of wrong images to show
SHOWN = 20  # number of predictions to print


class PredictionWriter(Callback):
    """Callback that writes `predictions.csv`: each image once, in order, for any world size.

    Args:
        top_k: Number of most likely classes of each image.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._rows: list[tuple[int, list[float], list[int]]] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *_: Any,
    ) -> None:
        """Store each image's index, and probabilities and labels of its most likely classes."""
        loader = trainer.predict_dataloaders
        if isinstance(pl_module, ImageClassifier) and isinstance(loader, GlobalBatches):
            shares, labels = outputs.topk(min(self.top_k, outputs.shape[1]))
            rows = loader.samples(batch_idx).tolist()
            self._rows += zip(rows, shares.tolist(), labels.tolist(), strict=True)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather all ranks' rows, and write the file. Collective."""
        rows = sorted(itertools.chain(*gather_objects(self._rows)))
        self._rows = []
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        has_writer = any(isinstance(callback, BasePredictionWriter) for callback in callbacks)
        if not rows and not has_writer:
            rank_zero_info(
                "no predictions.csv for your own model or data: give a BasePredictionWriter"
            )
        directory = trainer.log_dir  # a collective call
        if not trainer.is_global_zero or not rows or directory is None:
            return
        names = trainer.datamodule.class_names  # type: ignore[attr-defined]
        split = trainer.predict_dataloaders.split  # type: ignore[union-attr]
        known = split.labels.min() >= 0
        lines = []
        for index, shares, labels in rows:
            line = {"index": index}
            if split.names:
                line = {"file": split.names[index]}
            line["predicted"] = labels[0]
            for place, (share, label) in enumerate(zip(shares, labels, strict=True), 1):
                number = "" if place == 1 else place
                line |= {f"name{number}": names[label], f"probability{number}": f"{share:.6f}"}
                if known and place == 1:
                    line["label"] = split.labels[index].item()
            lines.append(line)
        show(lines)
        path = Path(directory, "predictions.csv")
        write_csv(path, [lines[0].keys(), *(line.values() for line in lines)])
        rank_zero_info(f"{counted(len(rows), 'prediction')}: {path}")


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the first predictions: file or index, class and probability."""
    first = next(iter(lines[0]))
    table = Table(first, "class", "probability", box=None, padding=(0, 2, 0, 0))
    for line in lines[:SHOWN]:
        cells = (str(line[first]), line["name"], f"{float(line['probability']):.1%}")
        # as Text, because rich would take [brackets] for markup
        table.add_row(*[Text(printable(cell), overflow="fold") for cell in cells])
    if len(lines) > SHOWN:
        table.add_row(f"… and {len(lines) - SHOWN:,} more")
    get_console().print(table)


class EvaluationFigures(Callback):
    """Callback that draws the confusion matrix and the most confidently wrong images.

    It follows `test` and `validate`, but not the validations of `fit`.

    Args:
        track: Whether to upload the wrong images.
    """

    def __init__(self, track: bool = False) -> None:
        self.track = track
        # confidence, row of the split, prediction and label of each image
        self._rows: list[tuple[float, int, int, int]] = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *_: Any,
    ) -> None:
        """Store each image's prediction."""
        loader = _evaluated(trainer)
        # a user's classifier may return no logits
        if loader is not None and isinstance(outputs, Tensor):
            shares, predicted = outputs.float().softmax(1).max(1)
            columns = (shares, loader.samples(batch_idx), predicted, batch[1])
            self._rows += zip(*[column.tolist() for column in columns], strict=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather all ranks' predictions; write, draw and upload their figures. Collective."""
        loader = _evaluated(trainer)
        if loader is None:
            return
        rows = list(itertools.chain(*gather_objects(self._rows)))
        self._rows = []
        directory = trainer.log_dir  # a collective call
        if not trainer.is_global_zero or not rows or directory is None:
            return
        # a local import, because matplotlib takes a fifth of all import time
        from app.monitor.report import draw_confusion_matrix
        from app.system.page import write_png

        names = list(trainer.datamodule.class_names)  # type: ignore[attr-defined]
        matrix = np.zeros((len(names), len(names)), int)
        for _, _, predicted, label in rows:
            matrix[label, predicted] += 1
        images = []
        lines = [["image", "label", "predicted", "probability"]]
        wrong = (row for row in rows if row[2] != row[3])
        for share, row, predicted, label in heapq.nlargest(WRONG, wrong):
            caption = f"{names[label]}\npredicted {share:.0%} {names[predicted]}"
            images.append((loader.split[row], caption))
            lines.append([loader.split.name(row), names[label], names[predicted], f"{share:.0%}"])
        confusion = Path(directory, "confusion_matrix.png")
        most_wrong = Path(directory, "most_wrong.png")
        corner = f"{'test' if trainer.testing else 'validation'}: label \\ predicted"
        counts = [[name, *row] for name, row in zip(names, matrix.tolist(), strict=True)]
        try:
            write_csv(confusion.with_suffix(".csv"), [[corner, *names], *counts])
            write_csv(most_wrong.with_suffix(".csv"), lines)
            write_png(confusion, draw_confusion_matrix(matrix, names))
            if images:
                with whole(most_wrong) as file:
                    file.write(draw_images(images))
        except OSError as error:
            rank_zero_info(f"{directory}: the confusions cannot be written ({error.strerror})")
        pictures = [confusion]
        if self.track:
            pictures.append(most_wrong)
        for tracker in trackers(trainer.loggers):
            tracker.log_pictures(pictures)

    on_validation_batch_end = on_test_batch_end  # type: ignore[assignment]
    on_validation_epoch_end = on_test_epoch_end


def _evaluated(trainer: Trainer) -> GlobalBatches | None:
    """Return the loader of a classifier's test or validation; None during training."""
    if trainer.state.fn == "fit" or not isinstance(trainer.lightning_module, ImageClassifier):
        return None
    loader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    return loader if isinstance(loader, GlobalBatches) else None
