"""`replay`: repeats a step of a run, and ranks its samples by loss."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import QUIET, App, error_of, options, output_of, tiny
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from app.modules import CIFARCNN
from app.monitor.report import read_metrics

RUN = tiny(
    90, 20, "CIFARCNN", virtual_devices=4, max_epochs=3, threads=1, flip=True, log_every_n_steps=1
)
THEIRS = [
    "--model",
    "plain_code.PlainModel",
    "--data",
    "test_replay.Poisoned",
    "--run.global_order",
    "true",
    *QUIET,
]
THEIRS += [
    "--run.name",
    "poisoned",
    "--run.threads",
    "1",
    "--trainer.log_every_n_steps",
    "1",
    "--run.test",
    "false",
]


class Poisoned(LightningDataModule):
    """Data of noise images, with one or three bad images at index `bad`.

    If `value` exceeds 1e38, there is one bad image, whose pixels overflow. Otherwise, there are
    three. They have the same pixels, which are too large, but different labels.
    """

    def __init__(self, bad: int, value: float, count: int = 2000) -> None:
        super().__init__()
        images = torch.rand(count, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        images[bad : bad + (1 if value > 1e38 else 3)] = images[bad] * value
        self.dataset = TensorDataset(images, torch.arange(count) % 3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=100, shuffle=True)


def largest(out: str) -> str:
    """Return the line of the sample with the largest loss."""
    return next(line for line in out.splitlines() if line.startswith("largest loss"))


@pytest.mark.usefixtures("drawn")
def test_a_step_of_a_run(app: App, tmp_path: Path) -> None:
    """The repeated step has the loss that the run logged. Its page lists all samples."""
    output_of(
        *app(
            "fit", *RUN, "--run.name", "run", "--model.schedule", "cosine", "--model.warmup", "1ep"
        )
    )
    folder = tmp_path / "runs" / "run" / "version_0"
    out = output_of(*app("replay", "--config", folder / "config.yaml", "--step", "7"))
    logged = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    column = logged[0].index("train_loss_step")
    (loss,) = [
        float(row[column])
        for row in logged[1:]
        if row[logged[0].index("step")] == "6" and row[column]
    ]
    assert f"Step 7, epoch 2: loss {loss:.4g}" in out
    assert "step 7, from " in out
    assert ".ckpt" in out, "it begins at a checkpoint, not with the first step"
    page = (folder / "replay" / "version_0" / "report.html").read_text()
    assert page.count("<tr>") == 1 + 20
    assert "as the network got them" in page


@pytest.mark.parametrize("value", ["1e39", "1e4"])
def test_a_poisoned_image(value: str, app: App, tmp_path: Path) -> None:
    """The NaN loss of one image ends the run; three images have too high losses."""
    bad = random.randrange(1997)
    flags = [*THEIRS, "--trainer.max_epochs", "1", "--data.bad", str(bad), "--data.value", value]
    flags += ["--model.normalized", str(value == "1e39").lower()]
    assert app("fit", *flags)[0] == (2 if value == "1e39" else 0)
    config = tmp_path / "runs" / "poisoned" / "version_0" / "config.yaml"
    out = output_of(*app("replay", "--config", config, "--step", "worst"))
    sample = int(largest(out).partition(": sample ")[2].partition(",")[0])
    assert sample in (range(bad, bad + 1) if value == "1e39" else range(bad, bad + 3))
    if value == "1e39":
        assert json.loads(config.with_name("run.json").read_text())["not_finite_step"]


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_worst_step_of_a_run_too_short_for_two_windows(
    epochs: int, app: App, tmp_path: Path
) -> None:
    """In 20 or 40 steps, no window of 50 steps ends: the whole run is searched."""
    flags = [
        *THEIRS,
        *options(log_every_n_steps=50, max_epochs=epochs),
        "--data.bad",
        "7",
        "--data.value",
        "1e4",
    ]
    output_of(*app("fit", *flags, "--model.normalized", "false"))
    config = tmp_path / "runs" / "poisoned" / "version_0" / "config.yaml"
    out = output_of(*app("replay", "--config", config, "--step", "worst"))
    assert f"replay  step 1 to {20 * epochs}, from the beginning" in out
    assert int(largest(out).partition(": sample ")[2].partition(",")[0]) in (7, 8, 9)


def test_a_shuffled_loader(app: App, tmp_path: Path) -> None:
    """A resumed loader would have another order."""
    flags = [
        *THEIRS,
        "--run.global_order",
        "false",
        "--data.bad",
        "0",
        "--data.value",
        "1",
        "--data.count",
        "300",
    ]
    output_of(*app("fit", *flags, "--trainer.max_epochs", "2"))
    folder = tmp_path / "runs" / "poisoned" / "version_0"
    loss = next(
        float(row["loss_step"]) for row in read_metrics(folder / "metrics.csv") if row["step"] == 4
    )
    out = output_of(*app("replay", "--config", folder / "config.yaml", "--step", "5"))
    assert f"Step 5, epoch 2: loss {loss:.4g}" in out


class Tenth(CIFARCNN):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.1 * cross_entropy(self(batch[0]), batch[1])


def test_a_training_step_of_the_user(app: App, tmp_path: Path) -> None:
    """`replay` ranks samples by the loss of the user's training_step.

    `fit` logs no training loss, because this training_step adds no batch to the sums of
    `app.modules.sums`.
    """
    output_of(
        *app(
            "fit",
            *tiny(90, 20, "test_replay.Tenth", max_epochs=1, log_every_n_steps=1),
            "--run.name",
            "x",
        )
    )
    folder = tmp_path / "runs" / "x" / "version_0"
    assert not [
        name
        for row in read_metrics(folder / "metrics.csv")
        for name in row
        if name.startswith("train")
    ]
    out = output_of(*app("replay", "--config", folder / "config.yaml", "--step", "2"))
    assert float(largest(out).split()[2].rstrip(":")) < 0.5


REFUSED = [
    (["--step", "3"], "--config: name the config.yaml of a run"),
    (["--config", "none.yaml"], "--config none.yaml: there is no run.json beside it"),
    (["--config", "CONFIG", "--step", "0"], "--step"),
    (["--config", "CONFIG", "--step", "99"], "--step 99: the run took 4 steps"),
    (["--config", "CONFIG"], "--step worst: the run took no step"),
    (["--config", "CONFIG", "--step", "2"], "last.ckpt: not a checkpoint, or damaged"),
    (["--config", "CONFIG", "--step", "4"], "run.json cannot be read"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_cannot_be_replayed(flags: list[str], message: str, app: App, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.touch()
    if "CONFIG" in flags:
        steps = 0 if "no step" in message else 4
        record = f'{{"steps": {steps}, "global_batch_size": 8}}'
        (tmp_path / "run.json").write_text("{" if "run.json" in message else record)
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "last.ckpt").write_text("damaged")
    assert message in error_of(
        *app("replay", *(str(config) if flag == "CONFIG" else flag for flag in flags))
    )
