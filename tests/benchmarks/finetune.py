"""Fine-tune a ResNet-18 on half of the classes, after training on the other half.

python tests/benchmarks/finetune.py FOLDER     # with a folder of images for each class
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import app

BOTH = {"model": "resnet18", "data": "ImageFolder", "flip": True, "crop_padding": 4}
BOTH |= {"model.schedule": "cosine", "test": False}
RATE = "model.optimizer.lr"
FIRST = {"batch_size": 128, RATE: 0.1, "model.optimizer.weight_decay": 5e-4, "model.warmup": "1ep"}
TUNED = {"batch_size": 32, RATE: 0.01, "model.head_lr": 10}
FRESH = {RATE: 0.05, "model.warmup": "1ep"}
FEW = 200  # images of each class for fine-tuning, and as many again for validation


def halves(images: Path, place: Path) -> list[Path]:
    """Link all images of the first half of the classes, and a few of the second half."""
    classes = sorted(path for path in images.iterdir() if path.is_dir())
    for number, label in enumerate(classes):
        files = sorted(label.iterdir())
        splits = {"first/train": files}
        if number >= len(classes) // 2:
            splits = {"second/train": files[:FEW], "second/val": files[FEW : 2 * FEW]}
        for split, chosen in splits.items():
            folder = place / split / label.name
            folder.mkdir(parents=True)
            for file in chosen:
                (folder / file.name).symlink_to(file.resolve())
    return [place / "first", place / "second"]


def train(images: Path, epochs: int, flags: dict[str, Any]) -> float:
    """Train a ResNet-18, and return its best accuracy on the validation images."""
    fixed = {"max_epochs": epochs, "data.root": str(images), "run.root": str(images.parent)}
    return max(row.val_acc for row in app.fit(**BOTH, **fixed, **flags).epochs)


def main() -> None:
    """Pretrain, fine-tune, train a fresh network; print the accuracies as a table."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = halves(Path(sys.argv[1]), Path(folder))
        accuracy = train(first, 15, FIRST | {"name": "pretrained"})
        weights = {"model.weights": f"{folder}/pretrained/version_0"}
        results = {
            "15 epochs on the first half": accuracy,
            "5 epochs from these weights": train(second, 5, TUNED | weights),
            "5 epochs from scratch": train(second, 5, FRESH),
            "20 epochs from scratch": train(second, 20, FRESH),
        }
    print("\n| on the second half | best validation accuracy |\n|---|---|")
    print(*(f"| {name} | {accuracy:.1%} |" for name, accuracy in results.items()), sep="\n")


if __name__ == "__main__":
    main()
