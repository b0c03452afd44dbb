"""Callbacks that write results: confusion matrix, wrong images, predictions."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.data.batches import GlobalBatches
from app.errors import UserError
from app.launch.agree import gather_objects
from app.modules import ImageClassifier
from app.monitor.loggers import trackers
from app.system.files import whole, write_csv

WRONG = 25  # number of wrong images to show


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
        """Store a row for each image of this rank: index, and probabilities and labels of its most likely classes."""
        loader = trainer.predict_dataloaders
        if isinstance(pl_module, ImageClassifier) and isinstance(loader, GlobalBatches):
            best = (tensor.tolist() for tensor in outputs.topk(min(self.top_k, outputs.shape[1])))
            self._rows += zip(loader.samples(batch_idx).tolist(), *best, strict=True)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather all ranks' rows, and write the file. Collective."""
        rows = sorted(row for local in gather_objects(self._rows) for row in local)
        self._rows = []
        directory = trainer.log_dir
        if not rows:
            rank_zero_info(
                "no predictions.csv for your own model or data: give a BasePredictionWriter as callback"
            )
        if not trainer.is_global_zero or not rows or directory is None:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        split = trainer.predict_dataloaders.split  # type: ignore[union-attr]
        path = Path(directory, "predictions.csv")
        files = split.names
        labels = split.labels.tolist()
        known = min(labels) >= 0
        more = [
            f"{column}{place + 1}"
            for place in range(1, len(rows[0][1]))
            for column in ("name", "probability")
        ]
        head = [
            "file" if files else "index",
            "predicted",
            "name",
            "probability",
            *["label"] * known,
            *more,
        ]
        lines = [head]
        for index, *best in rows:
            cells = [
                cell
                for p, label in zip(*best, strict=True)
                for cell in (data.class_names[label], f"{p:.6f}")
            ]
            line = [
                files[index] if files else index,
                best[1][0],
                *cells[:2],
                *[labels[index]] * known,
            ]
            lines.append(line + cells[2:])
        try:
            write_csv(path, lines)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): give another --run.root"
            ) from error
        rank_zero_info(f"{len(rows):,} prediction{'s' * (len(rows) > 1)}: {path}")


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
        confidence, predicted = outputs.max(1)
        at = (predicted != batch[1]).nonzero().flatten()
        rows = loader.samples(batch_idx).to(at.device)
        wrong = zip(*(t[at].tolist() for t in (confidence, rows, predicted, batch[1])), strict=True)
        self._worst = sorted([*self._worst, *wrong], reverse=True)[:WRONG]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather all ranks' results; write, draw and upload them. Collective."""
        loader = trainer.test_dataloaders
        if not isinstance(pl_module, ImageClassifier) or not isinstance(loader, GlobalBatches):
            return
        matrix = torch.atleast_2d(
            pl_module.confusion.compute()
        ).cpu()  # torchmetrics returns a scalar for one class
        pl_module.confusion.reset()
        worst = sorted(
            (row for local in gather_objects(self._worst) for row in local), reverse=True
        )[:WRONG]
        self._worst = []
        directory = trainer.log_dir
        if not trainer.is_global_zero or directory is None:
            return
        # a local import, because matplotlib takes a fifth of all import time
        from app.monitor.report import draw_confusion_matrix, draw_images
        from app.system.page import short

        names = list(trainer.datamodule.class_names)  # type: ignore[attr-defined]
        rows = [
            (loader.split[row], names[label], names[predicted], share)
            for share, row, predicted, label in worst
        ]
        captions = [
            f"{short(a, 24)}\npredicted {short(b, 13)}, {share:.0%}" for _, a, b, share in rows
        ]
        pictures = [Path(directory, "confusion_matrix.png"), Path(directory, "most_wrong.png")]
        counts = ([n, *r] for n, r in zip(names, matrix.tolist(), strict=True))
        try:
            write_csv(pictures[0].with_suffix(".csv"), [["label \\ predicted", *names], *counts])
            draw_confusion_matrix(matrix, names, pictures[0])
            figure = draw_images(
                [(row[0], caption) for row, caption in zip(rows, captions, strict=True)]
            )
            with whole(pictures[1]) as file:
                figure.savefig(file, format="png", dpi=120, transparent=True)
        except OSError as error:
            rank_zero_info(
                f"{directory}: the pictures of the test cannot be written ({error.strerror})"
            )
        kept = [path for path in pictures[: 1 + self.track] if path.exists()]
        for tracker in trackers(trainer.loggers):
            tracker.log_test_figures(matrix.tolist(), names, rows if self.track else [], kept)
