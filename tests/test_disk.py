"""A disk that fills up, or a folder that disappears, during training."""

import subprocess
from contextlib import suppress

import pytest
import torch
from forked import fork_app
from harness import SLOW, on_cpu, options, record, start_app, started

from app.command.checkpoint_file import read

FIT = [
    "--model=FashionMLP",
    "--model.repeats=1",
    "--data=Synthetic",
    "--trainer.enable_model_summary=false",
]
FIT += options(like="FashionMNIST", images=600, max_epochs=2, log_every_n_steps=2)
FIT += ["--last_checkpoint.every_n_train_steps=2"]
BIG = ["--model.hidden=[500]"]  # a checkpoint has 4.6 MiB, with Adam's state


@pytest.fixture
def disk(tmp_path):
    """A separate disk of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], check=True, timeout=20
    )
    yield place
    subprocess.run(["umount", "-l", place], check=True, timeout=20)


def leftovers(root):
    return [
        path
        for path in root.rglob("*")
        if path.is_file() and (path.name[0] == "." or not path.stat().st_size)
    ]


@pytest.mark.cluster
def test_full_disk_keeps_last_checkpoint(disk, tmp_path):
    """A checkpoint that does not fit leaves no file, and earlier checkpoints stay whole.

    The error line and the record name the reason.
    """
    filler = disk / "filler"
    filler.write_bytes(bytes(4 * 2**20))
    line = start_app.error("fit", *FIT, *BIG, "--run.root", disk / "runs")
    run = disk / "runs/FashionMLP-Synthetic/version_0"
    assert "the checkpoint cannot be written (No space left on device)" in line
    assert "make room there, or give another --run.root" in line
    saved = record(disk / "runs")
    assert (saved["status"], saved["error"]) == ("failed", line.removeprefix("error: "))
    assert not leftovers(disk)
    steps = {path.name: read(path)["global_step"] for path in (run / "checkpoints").glob("*.ckpt")}
    assert steps, "one is whole"
    filler.unlink()
    for kept in (run / "checkpoints").glob("last-1.ckpt"):
        kept.unlink()
    flags = ["--run.root", tmp_path / "runs", "--run.test=false"]
    fork_app("fit", *FIT, *BIG, *flags, "--ckpt_path", run / "checkpoints/last.ckpt")


@pytest.mark.cluster
def test_full_disk_cuts_no_metrics_line(disk, tmp_path):
    """On a disk that becomes full, training continues, and no line of metrics.csv is cut."""
    flags = [*FIT, "--model.hidden=[8]", "--trainer.max_epochs=40", "--data.images=2000"]
    flags += [
        "--last_checkpoint.every_n_train_steps=null",
        "--last_checkpoint.dirpath",
        tmp_path / "last",
    ]
    flags += ["--best_checkpoint.dirpath", tmp_path / "best"]
    with started(disk, *flags) as run:
        run.trained(2)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(2**12)):
                pass
        out = run.end(code=0)
    assert "cannot be written (No space left on device): training continues" in out
    rows = (run.directory / "metrics.csv").read_text().splitlines()
    assert {row.count(",") for row in rows} == {rows[0].count(",")}, "no line is cut"
    assert not leftovers(disk)
    filler.unlink()


@pytest.mark.cluster
@pytest.mark.parametrize("devices", [1, 2])
def test_full_tmpdir_is_harmless(devices, disk, tmp_path):
    """A full $TMPDIR does not stop a run whose own folder has room."""
    (disk / "filler").write_bytes(bytes(15 * 2**20 + 900_000))
    flags = [*FIT, *BIG, *on_cpu("auto", devices, root=tmp_path / "runs")]
    start_app("fit", *flags, env={"TMPDIR": str(disk)})
    last = tmp_path / "runs/FashionMLP-Synthetic/version_0/checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["epoch"] == 1
    assert [path.name for path in disk.iterdir()] == ["filler"]


@SLOW
def test_renamed_run_folder_is_created_again(tmp_path):
    """If a run's folder is renamed, the next checkpoint creates a new one."""
    flags = [*FIT, "--model.hidden=[8]", "--trainer.max_epochs=30", "--run.test=false"]
    with started(tmp_path, *flags) as run:
        run.trained(2)
        directory = run.directory.rename(tmp_path / "away")
        run.end(code=0)
    assert record(tmp_path)["status"] == "completed"
    assert directory.exists()
    assert read(run.directory / "checkpoints/last.ckpt")["epoch"] == 29
    assert (run.directory / "metrics.csv").exists()
