"""A user's module for live runs: everything that a rank's death could lose."""

import torch
from exact_code import Linear
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Everything(Linear):
    """Network with BatchNorm and dropout, metrics, means, and a schedule by validation loss."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        self.layer = nn.Sequential(*layers)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        vectors, labels = batch
        logits = self(vectors)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.mean(labels.double().mean())
        self.log("loss", loss, on_step=True, on_epoch=True)
        for name, metric in {"accuracy": self.accuracy, "mean": self.mean}.items():
            self.log(name, metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]
