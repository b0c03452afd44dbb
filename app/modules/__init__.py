"""LightningModules: networks, loss, metrics, optimizer, predictions."""

from app.modules.classifier import CIFARCNN, FashionMLP, ImageClassifier

__all__ = ["CIFARCNN", "FashionMLP", "ImageClassifier"]
