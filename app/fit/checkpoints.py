"""Checkpoints: finding one by name, telling what is wrong with one, and keeping the best."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.errors import UserError
from app.execution import IMPLEMENTATION
from app.modules import ImageClassifier
from app.system.lightning_patches import (
    may_stop_early,
    save_checkpoint_now,
    saves_within_epochs,
    steps_between_checkpoints,
)


class RunCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint` for one run directory after another, and for anybody's model.

    A resumed run has a directory of its own and still knows the best checkpoint so far, wherever it lies.
    A model that does not log the monitored metric gets its newest checkpoint kept instead of its best.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scores; Lightning forgets them when the directory is another one."""
        super().load_state_dict({**state_dict, "dirpath": self.dirpath})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give several kept checkpoints names of their own: one name would overwrite the better by the newer."""
        if self.save_top_k not in (0, 1) and self.filename and "{" not in self.filename:
            self.filename += "-{epoch}-{step}"
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not wait for a metric of a validation that will not be."""
        validated = trainer.num_val_batches
        if (self.monitor or "").startswith("val") and not (
            sum(validated) if isinstance(validated, list) else validated
        ):
            rank_zero_info("There is no validation: keeping the newest checkpoint instead of the best.")
            self.monitor = None
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save where training stops in the middle of an epoch.

        Not after its last step, but when it has ended: Lightning resumes from between the two without the validation.
        """
        if not trainer.is_last_batch:
            if saves_within_epochs(self):
                super().on_train_batch_end(trainer, *args, **kwargs)
            self._save_if_stopped(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a whole epoch; Lightning counts a broken-off one as done, and a resumed run would skip its rest."""
        if trainer.is_last_batch:
            super().on_train_epoch_end(trainer, pl_module)
            self._save_if_stopped(trainer)

    def _save_if_stopped(self, trainer: Trainer) -> None:
        """Keep the place where training ends, whenever checkpoints were asked for."""
        told = trainer.should_stop and may_stop_early(trainer)
        every = steps_between_checkpoints(self)
        due = every > 0 and trainer.is_last_batch and trainer.global_step % every == 0
        if not told and not due and not 0 <= trainer.max_steps <= trainer.global_step:
            return
        if self.monitor is None:
            save_checkpoint_now(self, trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give up monitoring the default metric if validation did not log it, then save."""
        if not trainer.sanity_checking and self.monitor == "val_acc" and "val_acc" not in trainer.callback_metrics:
            rank_zero_info(
                f"{type(pl_module).__name__} does not log {self.monitor}: keeping the newest checkpoint instead of the "
                "best; name a metric with --best_checkpoint.monitor"
            )
            self.monitor = None
        super().on_validation_end(trainer, pl_module)
        if not trainer.is_last_batch:  # early stopping may have decided so
            self._save_if_stopped(trainer)


def find_checkpoint(name: str, configs: Sequence[str], root: str, run: str) -> str:
    """Resolve `last` and `best`; a path stays as it is.

    Args:
        name: What was asked for.
        configs: The config files that were given. One from a run's directory means that run.
        root: Directory of all runs.
        run: Name of the run; without such a config, its newest checkpoint is meant.

    Raises:
        UserError: When there is none.
    """
    if name not in ("last", "best"):
        return name
    records = [path for config in configs if (path := Path(config).with_name("run.json")).is_file()]
    if records:
        kept = (json.loads(records[-1].read_text()).get("checkpoint") or {}).get(name)
        if kept is None:
            raise UserError(f"--ckpt_path {name}: the run in {records[-1].parent} has kept none: give a file's path")
        moved = records[-1].with_name("checkpoints") / Path(kept).name
        return str(moved) if moved.is_file() and not Path(kept).is_file() else str(kept)
    folder = Path(root, run)
    found = [path for path in folder.glob("version_*/checkpoints/*.ckpt") if path.stem.startswith(name)]
    if not found:
        raise UserError(
            f"--ckpt_path {name}: no {name}.ckpt under {folder}: name the run with --run.name, or give a file's path"
        )
    return str(max(found, key=lambda path: path.stat().st_mtime_ns))


def newest_checkpoint(root: str, run: str, of: tuple[str, list[str]] | None) -> str | None:
    """The newest checkpoint that can be read, or None.

    Args:
        root: Directory of all runs.
        run: Name of the run.
        of: Only those of runs with this command that one of these launchers has started.
    """
    found: list[Path] = []
    for record in Path(root, run).glob("version_*/run.json"):
        content = _read(record)
        if of is None or (content.get("command") == of[0] and set(of[1]) & set(content.get("launchers", ()))):
            found += record.parent.glob("checkpoints/*.ckpt")
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            _load(path)
        except UserError as error:
            rank_zero_info(f"left out: {error}")
        else:
            return str(path)
    return None


def tracked_as(checkpoint: str, command: str) -> str | None:
    """Id in the tracker of the run that wrote a checkpoint, if it had this command, too."""
    content = _read(Path(checkpoint).parent.with_name("run.json"))
    return content.get("tracker") if content.get("command") == command else None


def _read(record: Path) -> dict[str, Any]:
    """What a run's record says, or nothing: a loss of power can leave an empty one."""
    try:
        return dict(json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _load(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["state_dict"].keys()
    except Exception as error:  # unpickling what is no pickle can raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        raise UserError(f"--ckpt_path {path}: not a checkpoint, or truncated ({reason}): give another one") from error
    return checkpoint


def check_checkpoint(
    path: str, model: LightningModule, resumed_by: Trainer | None, may_be_finished: bool = False
) -> None:
    """Check that a checkpoint can be read and is of this model and, to resume, of this optimizer and unfinished.

    Raises:
        UserError: When it is missing, truncated, or of another model, naming the first differing key; when the
            optimizer was given other settings, which its state in the checkpoint would replace; or when it has
            already been trained for as long as was asked.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--ckpt_path {path}: there is no such file")
    checkpoint = _load(file)
    saved = checkpoint["state_dict"]
    weights = model.state_dict()
    for key in [*weights, *saved]:
        here, there = (tuple(d[key].shape) if key in d else None for d in (weights, saved))
        if here != there:
            raise UserError(
                f"--ckpt_path {path} is of another model than {type(model).__name__}: {key} is "
                f"{there or 'missing'} in the checkpoint and {here or 'missing'} in the model: give the --model (or "
                "--config) that it was trained with"
            )
    if resumed_by is None:
        return
    if not may_be_finished:
        _check_unfinished(path, checkpoint, resumed_by)
    own = isinstance(model, ImageClassifier) and not is_overridden("configure_optimizers", model, ImageClassifier)
    if own and checkpoint.get("optimizer_states"):
        assert isinstance(model, ImageClassifier)
        _check_optimizer(path, checkpoint["optimizer_states"][0]["param_groups"][0], model)


def _check_unfinished(path: str, checkpoint: dict[str, Any], trainer: Trainer) -> None:
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = loops.get("epoch_progress", {}).get("current", {}).get("processed", 0)
    for done, limit, name in (
        (epochs, trainer.max_epochs, "epochs"),
        (checkpoint.get("global_step", 0), trainer.max_steps, "steps"),
    ):
        if limit is not None and 0 <= limit <= done:
            raise UserError(
                f"--ckpt_path {path} has been trained for {done} {name}, as many as --trainer.max_{name} {limit}: "
                "give more"
            )


def _check_optimizer(path: str, saved: dict[str, Any], model: ImageClassifier) -> None:
    here = model.make_optimizer(model.parameters()).param_groups[0]
    if not here.keys() - IMPLEMENTATION <= saved.keys():  # a scheduler adds keys of its own
        raise UserError(f"--ckpt_path {path} is of another optimizer: give the --model.optimizer that it was made with")
    scheduled = "initial_lr" in saved  # then lr, and for some momentum, are the scheduler's
    own = {"params", *IMPLEMENTATION}
    for key in here.keys() - ({*own, "lr", "momentum", "betas"} if scheduled else own):
        if saved[key] != here[key]:
            raise UserError(
                f"--model.optimizer.{key} {here[key]}: a resumed run goes on with the checkpoint's optimizer, where "
                f"it is {saved[key]}: leave it out, or begin a new run"
            )
