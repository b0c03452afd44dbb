"""Checkpoints are written whole or not at all, even if the process or the disk fails; changed content is detected."""

import errno
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from app.command.checkpoint_file import LAST, PREVIOUS, CheckpointFiles, read
from app.errors import UserError
from app.system import files

KILLS = int(os.environ.get("KILLS", "50"))


def content(step: int, size: int = 40) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weight": torch.full((size,), float(step))}}


def test_every_change_of_the_content_is_seen(tmp_path: Path) -> None:
    path = tmp_path / LAST
    CheckpointFiles().save_checkpoint(content(1), path)
    assert read(path)["global_step"] == 1
    whole = path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        checkpoint = None
        with suppress(UserError):
            checkpoint = read(path)
        if checkpoint is not None:  # the bit lies outside of the content
            assert (checkpoint["global_step"], checkpoint["state_dict"]["weight"].tolist()) == (
                1,
                [1.0] * 40,
            )
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{path}: (damaged|not a checkpoint)"):
            read(path)


def test_checkpoints_of_others(tmp_path: Path) -> None:
    """Checkpoints that Lightning or torch wrote are loaded, also in torch's old format.

    A changed bit is detected by the zip archive's checksums, which torch ignores. A file without
    weights is rejected.
    """
    path = tmp_path / "theirs.ckpt"
    TorchCheckpointIO().save_checkpoint(content(2, 4000), path)
    assert CheckpointFiles().load_checkpoint(path)["global_step"] == 2
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1  # inside the tensor
    path.write_bytes(changed)
    with pytest.raises(UserError, match=r"theirs.ckpt: damaged \(archive/data/0\)"):
        read(path)
    torch.save(content(3), path, _use_new_zipfile_serialization=False)
    assert read(path)["global_step"] == 3
    for wrong in ([1], {"state_dict": 1}):
        torch.save(wrong, path)
        with pytest.raises(UserError, match="it holds no weights"):
            read(path)


class Call:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, zipped in (("new.ckpt", True), ("old.ckpt", False)):
        torch.save({"state_dict": {"w": Call()}}, name, _use_new_zipfile_serialization=zipped)
        with pytest.raises(
            UserError, match=r"it holds \w+.system, but only tensors and plain values are loaded"
        ):
            read(Path(name))
    assert not Path("ran").exists()


def test_the_one_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `last` keeps its previous checkpoint, even on a file system without hard links."""
    last, previous, best = (tmp_path / name for name in (LAST, PREVIOUS, "best.ckpt"))
    files_ = CheckpointFiles()
    for step in range(4):
        if step == 3:
            monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no links")))
        files_.save_checkpoint(content(step), last)
        files_.save_checkpoint(content(step), best)
        assert read(last)["global_step"] == step
        assert not step or read(previous)["global_step"] == step - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", PREVIOUS, LAST]


def test_a_kill_after_the_one_before_got_its_name(tmp_path: Path) -> None:
    """After a kill has interrupted a save, the next save keeps both checkpoints and leaves no temporary file.

    A kill after linking `last-1`, but before replacing `last`, leaves both names as hard links to
    one file. Renaming one of them to the other does nothing.
    """
    last, before = tmp_path / LAST, tmp_path / PREVIOUS
    CheckpointFiles().save_checkpoint(content(1), last)
    before.hardlink_to(last)
    CheckpointFiles().save_checkpoint(content(2), last)
    assert [read(path)["global_step"] for path in (before, last)] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([LAST, PREVIOUS])


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the error is one line, the earlier file is unchanged, and no unfinished file remains."""
    last = tmp_path / LAST
    CheckpointFiles().save_checkpoint(content(1), last)
    monkeypatch.setattr(
        os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    )
    with pytest.raises(
        UserError, match=f"{last}: .*No space left on device.*the previous one is kept: make room"
    ):
        CheckpointFiles().save_checkpoint(content(2), last)
    monkeypatch.undo()
    assert read(last)["global_step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """After a kill at any moment, the two newest checkpoints are whole, and the last finished save is not lost."""
    place, folder, seed = tmp_path / "steps", tmp_path / "checkpoints", random.Random(0)
    left = 0
    for _ in range(KILLS):
        pid = os.fork()
        if not pid:
            try:
                step = read(folder / LAST)["global_step"] if (folder / LAST).exists() else 0
                while True:
                    step += 1
                    CheckpointFiles().save_checkpoint(content(step, 100_000), folder / LAST)
                    place.write_text(str(step))
            finally:
                os._exit(1)
        time.sleep(seed.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left += len(list(folder.glob(f".*{files.PART}")))
        files.remove_parts(folder)
        assert not list(folder.glob(".*")), "what the killed one has left is removed"
        if folder.exists() and list(folder.iterdir()):
            step = read(folder / LAST)["global_step"]
            saved = int(place.read_text() or step) if place.exists() else step
            assert saved <= step, "what was saved is there"
            assert step == 1 or read(folder / PREVIOUS)["global_step"] in (step - 1, step)
    assert read(folder / LAST)["global_step"] > KILLS / 2
    assert left, "some were killed while they wrote"


def test_parts_that_are_written_are_left_alone(tmp_path: Path) -> None:
    with files.whole(tmp_path / "x") as file:
        file.write(b"x")
        files.remove_parts(tmp_path)
        assert len(list(tmp_path.glob(".*"))) == 1
    assert (tmp_path / "x").read_bytes() == b"x"
