"""`replay`: repeats a step of a run, and ranks its samples by loss."""

import random
import re
from pathlib import Path

import pytest
import torch
from harness import QUIET, options, record_of, tiny
from lightning import LightningDataModule
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from app.lab.replay import worst
from app.modules import CIFARCNN
from app.monitor.report import read_metrics
from app.record import Epoch, Record

RUN = tiny(
    90, 20, "CIFARCNN", virtual_devices=4, max_epochs=3, threads=1, flip=True, log_every_n_steps=1
)
THEIRS = ["--model=plain_code.PlainModel", "--data=test_replay.Poisoned", *QUIET]
THEIRS += options(name="poisoned", threads=1, log_every_n_steps=1, test=False)


class Poisoned(LightningDataModule):
    """Data of noise images, with one or three bad images at index `bad`.

    If `value` exceeds 1e38, there is one bad image, whose pixels overflow. Otherwise, there are
    three. They have the same pixels, which are too large, but different labels.
    """

    def __init__(self, bad: int, value: float, count: int = 2000):
        super().__init__()
        images = torch.rand(count, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        copies = 1 if value > 1e38 else 3
        images[bad : bad + copies] = images[bad] * value
        self.dataset = TensorDataset(images, torch.arange(count) % 3)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=100, shuffle=True)


def largest(out):
    """Return loss and name of the sample with the largest loss."""
    match = re.search(r"largest loss (.*): sample (.*), label", out)
    assert match, out
    return float(match[1]), match[2]


def logged(folder, step):
    """Return a step's loss in metrics.csv."""
    for row in read_metrics(folder / "metrics.csv"):
        for name in ("train_loss_step", "loss_step"):
            if row["step"] == step - 1 and name in row:
                return row[name]
    raise AssertionError(step)


@pytest.mark.usefixtures("drawn")
def test_step_has_the_loss_that_the_run_logged(app, fit):
    words = [*RUN, "--model.schedule=cosine", "--model.warmup=1ep"]
    words += ["--last_checkpoint.save_top_k=-1", "--last_checkpoint.filename={step}"]
    folder = fit(*words)
    out = app("replay", "--config", folder / "config.yaml", "--step=7")
    assert f"Step 7, epoch 2: loss {logged(folder, 7):.4g}" in out
    assert "step 7, from " in out
    assert ".ckpt" in out, "it begins at a checkpoint, not with the first step"
    page = (folder / "replay/version_0/report.html").read_text()
    assert page.count("<tr>") == 1 + 20
    assert "as the network got them" in page


@pytest.mark.parametrize("value", ["1e39", "1e4"])
def test_worst_step_has_the_bad_image(value, app, tmp_path):
    """The NaN loss of one image ends the run; three images have too high losses."""
    is_nan = value == "1e39"
    bad = random.randrange(1997)
    flags = [*THEIRS, *options(max_epochs=1, bad=bad, value=value)]
    flags += ["--model.normalized", str(is_nan).lower()]
    assert app.run("fit", *flags)[0] == (2 if is_nan else 0)
    config = tmp_path / "runs/poisoned/version_0/config.yaml"
    out = app("replay", f"--config={config}", "--step=worst")
    count = 1 if is_nan else 3
    assert int(largest(out)[1]) in range(bad, bad + count)
    assert bool(record_of(config.parent)["not_finite_step"]) == is_nan


RISES = [
    ("train_loss_step", [2.0], (1, 40)),
    ("train_loss_step", [2.0, 5.0, 6.0], (11, 20)),
    ("train_loss", [2.0, 5.0], (1, 40)),  # the means of two epochs
    ("train_loss", [2.0, 3.0, 5.0], (21, 30)),
]


@pytest.mark.parametrize(("name", "losses", "steps"), RISES)
def test_the_sharpest_rise_of_the_loss_is_searched(name, losses, steps, tmp_path):
    """A run too short for two windows is searched as a whole."""
    file = tmp_path / "metrics.csv"
    lines = [f"step,{name},lr-SGD"]
    for window, loss in enumerate(losses):
        lines += [f"{10 * window + 9},{loss},", f"{10 * window + 9},,0.1"]
    file.write_text("\n".join(lines))
    assert worst(Record(steps=40, epochs=[Epoch(0), Epoch(1)]), file) == steps


def test_run_with_a_plain_loader_is_repeated_from_its_beginning(app, fit):
    """A resumed loader would have another order."""
    flags = options(loader="lightning", bad=0, value=1, count=300, max_epochs=2)
    folder = fit(*THEIRS, *flags)
    out = app("replay", "--config", folder / "config.yaml", "--step=5")
    assert f"Step 5, epoch 2: loss {logged(folder, 5):.4g}" in out


class Tenth(CIFARCNN):
    def training_step(self, batch, batch_idx):
        return 0.1 * cross_entropy(self(batch[0]), batch[1])


def test_samples_are_ranked_by_the_loss_of_the_user_s_training_step(app, fit):
    config = fit(*tiny(90, 20, "test_replay.Tenth", max_epochs=1)) / "config.yaml"
    out = app("replay", f"--config={config}", "--step=2")
    assert largest(out)[0] < 0.5


FOUR = '{"steps": 4, "global_batch_size": 8}'
REFUSED = [
    ("--step 3", FOUR, "--config: name the config.yaml of a run"),
    ("--config none.yaml", FOUR, "--config none.yaml: there is no such file"),
    ("--config config.yaml --step 0", FOUR, "--step"),
    ("--config config.yaml --step 99", FOUR, "--step 99: the run took 4 steps"),
    ("--config config.yaml", FOUR.replace("4", "0"), "--step worst: the run took no step"),
    ("--config config.yaml --step 2", FOUR, "last.ckpt: not a checkpoint, or damaged"),
    ("--config config.yaml --step 4", "{", "run.json cannot be read"),
]


@pytest.mark.parametrize(("flags", "record", "message"), REFUSED)
def test_impossible_replay_is_rejected(flags, record, message, app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("{}")
    Path("run.json").write_text(record)
    Path("checkpoints").mkdir()
    Path("checkpoints/last.ckpt").write_text("damaged")
    assert message in app.error("replay", *flags.split())
