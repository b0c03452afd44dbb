"""Checkpoint files: written atomically, and verified by their checksums."""

import copy
import io
import os
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.plugins.io import TorchCheckpointIO

from app.errors import UserError
from app.system.files import PART, sync_folder, whole
from app.system.torch_files import load, unreadable

FLAG = "--ckpt_path"
LAST = "last.ckpt"
SNAPSHOT = "the newest step"  # stands for the path of a checkpoint in memory
PREVIOUS = "last-1.ckpt"  # the `last.ckpt` that a newer one has replaced
HYPERPARAMETERS = (  # sections of a checkpoint; the types are OmegaConf's
    LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY,
    LightningDataModule.CHECKPOINT_HYPER_PARAMS_TYPE,
)


class CheckpointFiles(TorchCheckpointIO):
    """Checkpoint plugin for local files; Lightning handles remote paths.

    Attributes:
        snapshot: Checkpoint in memory, loaded from the path `SNAPSHOT`; None without one.
    """

    snapshot: dict[str, Any] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; if it replaces `last.ckpt`, keep the old file as `last-1.ckpt`.

        Unreadable hyperparameters are dropped.

        Raises:
            UserError: When the file cannot be written. An existing file is kept.
        """
        drop_unreadable(checkpoint)
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        file = Path(path)
        torch.save(checkpoint, buffer)
        try:
            try:
                _write(file, buffer)
            except FileNotFoundError:  # somebody has just renamed the folder
                _write(file, buffer)
        except OSError as error:
            raise UserError(
                f"{file}: the checkpoint cannot be written ({error.strerror}): make room there, or "
                "give another --run.root; any previous one is kept"
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint on the host; load only tensors and plain values."""
        if path == SNAPSHOT and self.snapshot is not None:
            return copy.deepcopy(self.snapshot)
        if "://" in str(path):
            return super().load_checkpoint(path, weights_only=True)
        return load(Path(path), FLAG)


def drop_unreadable(checkpoint: dict[str, Any]) -> list[str]:
    """Drop hyperparameters that `load` would reject, such as modules; return their names."""
    dropped = []
    for section in HYPERPARAMETERS:
        values = checkpoint.get(section)
        if not unreadable(values):
            continue
        del checkpoint[section]
        if isinstance(values, dict):
            unusable = [name for name, value in values.items() if unreadable(value)]
            checkpoint[section] = {name: values[name] for name in values if name not in unusable}
            dropped += unusable
        else:
            dropped.append(section)
    return dropped


def _write(file: Path, content: io.BytesIO) -> None:
    with whole(file) as stream:
        stream.write(content.getbuffer())
        stream.flush()
        os.fsync(stream.fileno())
        if file.name == LAST and file.exists():
            _keep(file, file.with_name(PREVIOUS))


def _keep(file: Path, name: Path) -> None:
    """Keep a file under a second name, as a hard link; rename it where there are no hard links.

    One of the two files always exists.
    """
    # a run made this link, and was killed before it replaced `file`
    if name.exists() and name.samefile(file):
        return
    link = name.with_name(f".{name.name}.{os.urandom(4).hex()}{PART}")
    try:
        link.hardlink_to(file)
        link.replace(name)
    except OSError:  # a file system without hard links
        file.replace(name)
    sync_folder(file.parent)


def read(path: Path) -> dict[str, Any]:
    """Verify a checkpoint's checksums, and load it on the host.

    Raises:
        UserError: When the file is missing, damaged, or not a checkpoint.
    """
    checkpoint = load(path, FLAG)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise UserError(f"{FLAG} {path}: not a checkpoint: it holds no weights")
    return checkpoint
