"""Checkpoints: finding one by name, telling what is wrong with one, and keeping the best."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.errors import UserError


class RunCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` for one run directory after another, and for anybody's model.

    A resumed run has a directory of its own and still knows the best checkpoint so far, wherever it lies.
    A model that does not log the monitored metric gets its newest checkpoint kept instead of its best.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scores; Lightning forgets them when the directory is another one."""
        super().load_state_dict({**state_dict, "dirpath": self.dirpath})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give up monitoring a metric that validation did not log, then save."""
        if not trainer.sanity_checking and self.monitor and self.monitor not in trainer.callback_metrics:
            rank_zero_info(
                f"{type(pl_module).__name__} does not log {self.monitor}: keeping the newest checkpoint instead of the "
                "best; name a metric with --best_checkpoint.monitor"
            )
            self.monitor = None
        super().on_validation_end(trainer, pl_module)


def find_checkpoint(name: str, root: str, run: str) -> str:
    """Resolve `last` and `best` to the newest such checkpoint of a run's name; a path stays as it is.

    Raises:
        UserError: When there is none.
    """
    if name not in ("last", "best"):
        return name
    folder = Path(root, run)
    found = [path for path in folder.glob("version_*/checkpoints/*.ckpt") if path.stem.startswith(name)]
    if not found:
        raise UserError(
            f"--ckpt_path {name}: no {name}.ckpt under {folder}: name the run with --run.name, or give a file's path"
        )
    return str(max(found, key=lambda path: path.stat().st_mtime_ns))


def check_checkpoint(path: str, model: LightningModule) -> None:
    """Check that a checkpoint can be read and is of this model.

    Raises:
        UserError: When it is missing, truncated, or of another model, naming the first differing key.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--ckpt_path {path}: there is no such file")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        saved = checkpoint["state_dict"]
    except Exception as error:  # unpickling what is no pickle can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        raise UserError(f"--ckpt_path {path}: not a checkpoint, or truncated ({reason}): give another one") from error
    own = model.state_dict()
    for key in [*own, *saved]:
        here, there = (tuple(d[key].shape) if key in d else None for d in (own, saved))
        if here != there:
            raise UserError(
                f"--ckpt_path {path} is of another model than {type(model).__name__}: {key} is "
                f"{there or 'missing'} in the checkpoint and {here or 'missing'} in the model: give the --model (or "
                "--config) that it was trained with"
            )
