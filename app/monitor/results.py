"""Callbacks that write results: confusion matrix, wrong images, predictions."""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich import get_console
from rich.table import Table
from rich.text import Text

from app.data.batches import GlobalBatches
from app.errors import printable
from app.launch.agree import gather_objects
from app.modules import ImageClassifier
from app.monitor.loggers import trackers
from app.record.words import counted
from app.system.files import write_csv

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
            rows = loader.order.samples(batch_idx).tolist()
            self._rows += zip(rows, shares.tolist(), labels.tolist(), strict=True)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather all ranks' rows, and write the file. Collective."""
        rows = sorted(itertools.chain(*gather_objects(self._rows)))
        self._rows = []
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
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


class TestFigures(Callback):
    """Callback that draws the confusion matrix and the most confidently wrong test images.

    Args:
        track: Whether to upload the wrong images.
    """

    __test__ = False  # because pytest collects classes named Test…

    def __init__(self, track: bool = False) -> None:
        self.track = track
        self._worst: list[tuple[float, int, int, int]] = []  # confidence, index, predicted, label

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        *_: Any,
    ) -> None:
        """Store this rank's most confidently wrong images."""
        loader = trainer.test_dataloaders
        if not isinstance(pl_module, ImageClassifier) or not isinstance(loader, GlobalBatches):
            return
        shares, predicted = outputs.max(1)
        wrong = predicted != batch[1]
        rows = loader.order.samples(batch_idx).to(wrong.device)
        columns = [column[wrong].tolist() for column in (shares, rows, predicted, batch[1])]
        self._worst = heapq.nlargest(WRONG, [*self._worst, *zip(*columns, strict=True)])

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather all ranks' results; write, draw and upload them. Collective."""
        loader = trainer.test_dataloaders
        if not isinstance(pl_module, ImageClassifier) or not isinstance(loader, GlobalBatches):
            return
        # torchmetrics returns a scalar for one class
        matrix = torch.atleast_2d(pl_module.confusion.compute()).cpu()
        pl_module.confusion.reset()
        worst = heapq.nlargest(WRONG, itertools.chain(*gather_objects(self._worst)))
        self._worst = []
        directory = trainer.log_dir  # a collective call
        if not trainer.is_global_zero or directory is None:
            return
        # a local import, because matplotlib takes a fifth of all import time
        from app.monitor.report import draw_confusion_matrix, draw_images
        from app.system.page import short, write_png

        names = list(trainer.datamodule.class_names)  # type: ignore[attr-defined]
        images = []
        for share, row, predicted, label in worst:
            prediction = f"predicted {short(names[predicted], 13)}, {share:.0%}"
            images.append((loader.split[row], f"{short(names[label], 24)}\n{prediction}"))
        confusion = Path(directory, "confusion_matrix.png")
        most_wrong = Path(directory, "most_wrong.png")
        counts = [[name, *row] for name, row in zip(names, matrix.tolist(), strict=True)]
        try:
            write_csv(confusion.with_suffix(".csv"), [["label \\ predicted", *names], *counts])
            write_png(confusion, draw_confusion_matrix(matrix.numpy(), names))
            write_png(most_wrong, draw_images(images))
        except OSError as error:
            rank_zero_info(
                f"{directory}: the pictures of the test cannot be written ({error.strerror})"
            )
        pictures = [confusion]
        if self.track:
            pictures.append(most_wrong)
        for tracker in trackers(trainer.loggers):
            tracker.log_pictures(pictures)
