"""Data: where images come from, how ranks share them, and what happens to their pixels."""

from app.data.datasets import CIFAR10, FashionMNIST, ImageFolder, Synthetic
from app.data.module import ImageData

__all__ = ["CIFAR10", "FashionMNIST", "ImageData", "ImageFolder", "Synthetic"]
