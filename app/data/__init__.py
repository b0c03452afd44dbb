"""Data: image sources, rank shares, and augmentation."""

from app.data.module import CIFAR10, FashionMNIST, ImageData, ImageFolder, Synthetic

__all__ = ["CIFAR10", "FashionMNIST", "ImageData", "ImageFolder", "Synthetic"]
