"""Data: where images come from, how ranks share them, and what happens to their pixels."""

from app.data.module import CIFAR10, FashionMNIST, ImageData, ImageFolder, Synthetic

__all__ = ["CIFAR10", "FashionMNIST", "ImageData", "ImageFolder", "Synthetic"]
