"""One copy of the images for all ranks of a node."""

import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster.hosts import awaited
from harness import QUIET, error_of, family, free_port, start_app, started

from app.launch.sharing import NodeMemory, open_handle, read_once

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
SLOW = pytest.mark.slow
STEPS = ["--trainer.max_epochs", "1", "--trainer.max_steps", "2", "--run.test", "false", *QUIET]


def way(strategy: str = "ddp", devices: int = 2) -> list[str]:
    return ["--trainer.accelerator", "cpu", "--trainer.strategy", strategy, "--trainer.devices", str(devices)]


def says_where(directory: Path) -> list[str]:
    callback = "--trainer.callbacks+=user_code.SaysWhereImagesLie"
    return [callback, "--trainer.callbacks.directory", str(directory)]


def notes(directory: Path, ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((directory / f"rank{rank}").read_text()) for rank in range(ranks)]


def test_a_handle_opens_the_same_memory() -> None:
    memory = NodeMemory()
    made = [memory.empty((3, 5), dtype=torch.uint8), memory.empty((2,), dtype=torch.int64)]
    none = memory.empty((0, 5), dtype=torch.uint8)
    made[0].fill_(7)
    handle = memory.handle([made[1], made[0], none])
    labels, images, nothing = open_handle(handle)
    assert (images.dtype, images.shape, nothing.shape) == (torch.uint8, (3, 5), (0, 5))
    assert (images == 7).all()
    made[1][1] = 2**40
    assert labels.tolist() == [0, 2**40]
    path, name, places = handle
    with pytest.raises(OSError, match="of another process"):
        open_handle((path, f"{name}0", places))
    memory.close()
    assert labels.tolist() == [0, 2**40], "what is mapped stays"
    with pytest.raises(OSError, match="No such file"):
        open_handle(handle)


def test_a_process_alone_reads_for_itself() -> None:
    (made,) = read_once(None, lambda empty: (empty((2,), dtype=torch.uint8).fill_(3),))
    assert made.tolist() == [3, 3]


def test_what_one_rank_reads_the_other_maps(cifar_root: Path, tmp_path: Path) -> None:
    data = ["--data", "user_code.TinyCIFAR10", "--data.root", cifar_root, "--data.batch_size", "8"]
    code, out = start_app("fit", *data, *way(), *STEPS, *says_where(tmp_path), "--run.root", tmp_path)
    assert code == 0, out
    first, second = notes(tmp_path)
    assert first["process"] != second["process"]
    assert first["inode"] == second["inode"] > 0
    assert first["sums"] == second["sums"]
    assert out.count("is read by process") == out.count(f"train is read by process {first['process']}\n") == 1


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
@pytest.mark.parametrize("name", ["Synthetic", "FashionMNIST", "ImageFolder"])
def test_whatever_is_read_and_however_ranks_start(
    name: str, strategy: str, fashion_root: Path, image_root: Path, tmp_path: Path
) -> None:
    flags = {
        "Synthetic": ["--data.size", "200", "--data.placement", "device"],
        "FashionMNIST": ["--data.root", fashion_root, "--model", "FashionMLP"],
        "ImageFolder": ["--data.root", image_root],
    }
    data = ["--data", name, *flags[name], "--data.batch_size", "8"]
    code, out = start_app("fit", *data, *way(strategy), *STEPS, *says_where(tmp_path), "--run.root", tmp_path)
    assert code == 0, out
    first, second = notes(tmp_path)
    assert first["inode"] == second["inode"] > 0
    assert first["sums"] == second["sums"]
    code, out = start_app("fit", *data, *STEPS, *says_where(tmp_path), "--run.root", tmp_path)
    assert code == 0, out
    assert notes(tmp_path, 1)[0]["sums"] == first["sums"], "as read by one process"


@SLOW
def test_each_node_has_a_copy(tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ["--data", "Synthetic", "--data.size", "200", "--data.batch_size", "8", "--trainer.num_nodes", "2"]
    flags += [*way(), *STEPS, *says_where(tmp_path), "--run.root", str(tmp_path)]
    with ThreadPoolExecutor() as nodes:
        runs = [
            nodes.submit(start_app, "fit", *flags, env={**address, "NODE_RANK": str(node)}, timeout=240)
            for node in range(2)
        ]
    for run in runs:
        code, out = run.result()
        assert code == 0, out
    inodes = [note["inode"] for note in notes(tmp_path, 4)]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=SLOW)])
def test_a_broken_image_is_reported_once(strategy: str, image_root: Path, tmp_path: Path) -> None:
    image = image_root / "train" / "dog" / "02.jpg"
    image.write_bytes(b"not an image")
    flags = ["--data", "ImageFolder", "--data.root", image_root, "--data.batch_size", "8", "--run.root", tmp_path]
    code, out = start_app("fit", *flags, *way(strategy), *QUIET)
    said = error_of(code, out)
    assert str(image) in said
    assert out.count("cannot be read") == 1
    if strategy == "ddp":  # a spawned process may be ended before it has written
        record = json.loads(next(tmp_path.glob("*/*/run.json")).read_text())
        assert record["error"] == f"UserError: {said.removeprefix('error: ')}"


@SLOW
def test_ranks_agree_on_a_placement(tmp_path: Path) -> None:
    flags = ["--data", "user_code.FillsUpOnRank1", "--data.size", "200", "--data.batch_size", "8"]
    flags += ["--run.root", str(tmp_path)]
    code, out = start_app("fit", *flags, *way(), *STEPS, "--data.num_workers", "0")
    assert code == 0, out
    assert json.loads(next(tmp_path.glob("*/*/run.json")).read_text())["placement"] == "disk"


@SLOW
def test_a_batch_that_is_a_fraction_of_what_is_not_otherwise_read(tmp_path: Path) -> None:
    """Of the training images, in `test`: rank zero's record asks for it where the others do not."""
    flags = ["--data", "Synthetic", "--data.size", "100", "--data.batch_size", "0.25", *QUIET, "--run.root", tmp_path]
    code, out = start_app("fit", *flags, "--data.batch_size", "24", *STEPS)
    assert code == 0, out
    code, out = start_app("test", *flags, *way(), "--data.val_size", "20", "--ckpt_path", "last")
    assert code == 0, out


@SLOW
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_nothing_stays_behind(strategy: str, tmp_path: Path) -> None:
    flags = ["--data", "Synthetic", "--data.size", "200", "--data.batch_size", "20", "--trainer.max_epochs", "100000"]
    with started(tmp_path, *flags, *QUIET, *way(strategy), *says_where(tmp_path)) as run:
        awaited(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)), 120)
        assert len(mapped_by(notes(tmp_path)[0]["path"])) >= 2
        for process in family(run.mark):
            os.kill(process, signal.SIGKILL)
        run.end()
    first, second = notes(tmp_path)
    assert first["path"] == second["path"]
    assert not mapped_by(first["path"])


def mapped_by(path: str) -> list[Path]:
    """The processes that have a piece of memory mapped."""
    found = []
    for file in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # of a process that has ended meanwhile
            if path.split()[0] in file.read_text():
                found.append(file)
    return found
