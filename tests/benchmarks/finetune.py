"""Fine-tune a ResNet-18 on half of the classes, after training on the other half.

    python tests/benchmarks/finetune.py FOLDER     # with a folder of images for each class

The command of each run is printed.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

BOTH = """
fit --model resnet18 --data ImageFolder --data.flip true --data.crop_padding 4
--model.schedule cosine --run.test false
"""
FIRST = (
    "--data.batch_size 128 --model.optimizer.lr 0.1 --model.optimizer.weight_decay 5e-4 "
    "--model.warmup 1ep"
)
TUNED = "--data.batch_size 32 --model.optimizer.lr 0.01 --model.head_lr 10"
FRESH = "--model.optimizer.lr 0.05 --model.warmup 1ep"
FEW = 200  # images of each class for fine-tuning, and as many again for validation


def halves(images: Path, place: Path) -> list[Path]:
    """Link all images of the first half of the classes, and a few of the second half."""
    classes = sorted(path for path in images.iterdir() if path.is_dir())
    middle = len(classes) // 2
    for half, members in (("first", classes[:middle]), ("second", classes[middle:])):
        for label in members:
            files = sorted(label.iterdir())
            splits = {"train": files}
            if half == "second":
                splits = {"train": files[:FEW], "val": files[FEW : 2 * FEW]}
            for split, chosen in splits.items():
                folder = place / half / split / label.name
                folder.mkdir(parents=True)
                for file in chosen:
                    (folder / file.name).symlink_to(file.resolve())
    return [place / "first", place / "second"]


def train(
    place: Path, name: str, images: Path, epochs: int, *flags: str | Path
) -> tuple[Path, float]:
    """Train a ResNet-18; return the run's folder and its best accuracy on the validation images."""
    words = [*BOTH.split(), "--data.root", str(images), "--trainer.max_epochs", str(epochs)]
    words += ["--run.root", str(place / "runs"), "--run.name", name, *map(str, flags)]
    print("python -m app", shlex.join(words), flush=True)
    command = [sys.executable, "-m", "app", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    run = place / "runs" / name / "version_0"
    rows = json.loads((run / "run.json").read_text())["epochs"]
    return run, max(row["val_acc"] for row in rows)


def main() -> None:
    """Pretrain, fine-tune, train a fresh network; print the accuracies as a table."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        first, second = halves(Path(sys.argv[1]), place)
        pretrained, accuracy = train(place, "pretrained", first, 15, *FIRST.split())
        results = {f"15 epochs on the first half ({accuracy:.1%})": accuracy}
        tuned = [*TUNED.split(), "--model.weights", pretrained]
        fresh = FRESH.split()
        runs = ((5, "these weights", tuned), (5, "scratch", fresh), (20, "scratch", fresh))
        for epochs, start, flags in runs:
            name = f"{epochs} epochs from {start}"
            results[name] = train(place, name.replace(" ", "_"), second, epochs, *flags)[1]
        print("\n| on the second half | best validation accuracy |\n|---|---|")
        print(*(f"| {name} | {accuracy:.1%} |" for name, accuracy in results.items()), sep="\n")


if __name__ == "__main__":
    main()
