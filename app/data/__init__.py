"""Data: sources of images, each rank's share, and augmentation."""

from app.data.module import CIFAR10, FashionMNIST, ImageData, ImageFolder, Synthetic

__all__ = ["CIFAR10", "FashionMNIST", "ImageData", "ImageFolder", "Synthetic"]
