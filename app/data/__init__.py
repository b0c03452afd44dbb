"""Data: image sources, rank shares, and augmentation."""

from app.data.datasets import (
    CIFAR10,
    FashionMNIST,
    HuggingFace,
    ImageFolder,
    ImageTable,
    NewImages,
    Synthetic,
)
from app.data.module import ImageData

__all__ = [
    "CIFAR10",
    "FashionMNIST",
    "HuggingFace",
    "ImageData",
    "ImageFolder",
    "ImageTable",
    "NewImages",
    "Synthetic",
]
