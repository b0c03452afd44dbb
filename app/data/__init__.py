"""Data: image sources, rank shares, and augmentation."""

from app.data.module import CIFAR10, FashionMNIST, HuggingFace, ImageData, ImageFolder, ImageTable, Synthetic

__all__ = ["CIFAR10", "FashionMNIST", "HuggingFace", "ImageData", "ImageFolder", "ImageTable", "Synthetic"]
