"""Checkpoints: lookup by name, checks before use, and the callback that saves them."""

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from app.command.checkpoint_file import FLAG, read
from app.data import ImageData
from app.errors import UserError
from app.modules import ImageClassifier
from app.modules.execution import IMPLEMENTATION
from app.modules.weights import checkpoint_of
from app.record import Record, reaches
from app.record.words import listed
from app.system.lightning_patches import is_stopped
from app.system.patches import expects
from app.system.torch_files import check_exists

WEIGHTS_ALONE = "it holds only weights"
_CHECKPOINT = "lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint"


@expects(
    f"{_CHECKPOINT}._every_n_train_steps",
    f"{_CHECKPOINT}._last_global_step_saved",
    f"{_CHECKPOINT}._monitor_candidates",
    f"{_CHECKPOINT}._save_topk_checkpoint",
    f"{_CHECKPOINT}._should_skip_saving_checkpoint",
    f"{_CHECKPOINT}._train_time_interval",
)
class RunCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, adapted to resumed runs and to any model.

    A run resumed in a new directory keeps the best score so far. For a model that does not log
    `val_acc`, the best checkpoint is the one with the lowest `val_loss`; if the model logs neither
    metric, the newest checkpoint is kept.
    """

    @cached_property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint, cached because its metric may change."""
        return super().state_key

    best_loss = math.nan  # validation loss of the best checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the scores so far."""
        return {**super().state_dict(), "best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scores, which Lightning would drop in a new directory."""
        if (self.monitor, state_dict["monitor"]) == ("val_acc", "val_loss"):
            self._minimise("val_loss")
        super().load_state_dict({**state_dict, "dirpath": self.dirpath})
        self.best_loss = state_dict.get("best_loss", math.nan)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a checkpoint is kept. Of equal accuracies, that of lower loss is kept."""
        is_better = super().check_monitor_top_k(trainer, current)
        loss = float(trainer.callback_metrics.get("val_loss", math.nan))
        if self.monitor == "val_acc" and current == self.best_model_score:
            is_better = is_better or loss < self.best_loss
        if is_better:
            self.best_loss = loss
        return is_better

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add epoch and step to the names of several checkpoints, so that none is overwritten."""
        if self.save_top_k != 1 and self.filename and "{" not in self.filename:
            self.filename += "-{epoch}-{step}"
        with warnings.catch_warnings():  # a resumed run uses its existing folder
            warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        self._last_global_step_saved = -1  # because a probe is saved at step 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop monitoring a validation metric in a run without validation."""
        if (self.monitor or "").startswith("val") and not sum(trainer.num_val_batches):
            rank_zero_info(
                "There is no validation: keeping the newest checkpoint instead of the best."
            )
            self.monitor = None
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Save within an epoch, if a checkpoint is due or training stops.

        After an epoch's last step, `on_train_epoch_end` saves instead, once the validation has
        ended. A checkpoint from before the validation would make a resumed run skip the validation.
        """
        if not trainer.is_last_batch:
            if self._every_n_train_steps or self._train_time_interval is not None:
                super().on_train_batch_end(trainer, *args, **kwargs)
            self._save_if_stopped(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after a complete epoch.

        Lightning also calls this hook after an interrupted epoch. A checkpoint saved then would
        make a resumed run skip the rest of the epoch.
        """
        if trainer.is_last_batch:
            super().on_train_epoch_end(trainer, pl_module)
            self._save_if_stopped(trainer)

    def _save_if_stopped(self, trainer: Trainer) -> None:
        """Save if no metric is monitored, and training ends or a checkpoint is due.

        Never save a step twice. When you upgrade Lightning, compare this method with
        `ModelCheckpoint.on_train_batch_end`.
        """
        step = trainer.global_step
        every = self._every_n_train_steps
        is_due = every > 0 and trainer.is_last_batch and step % every == 0
        is_complete = 0 <= trainer.max_steps <= step
        if self.monitor is None and (is_stopped(trainer) or is_complete or is_due):
            names = {**trainer.callback_metrics, "epoch": torch.tensor(trainer.current_epoch)}
            names["step"] = torch.tensor(step)
            if not self._should_skip_saving_checkpoint(trainer):
                self._save_topk_checkpoint(trainer, names)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the default metric if validation did not log it; save if a checkpoint is due."""
        logged = trainer.callback_metrics
        if not trainer.sanity_checking and self.monitor == "val_acc" and "val_acc" not in logged:
            loss = None
            kept = (
                "keeping the newest checkpoint: give --best_checkpoint.monitor NAME, and for a "
                "loss --best_checkpoint.mode min"
            )
            if "val_loss" in logged:
                loss = "val_loss"
                kept = "the best checkpoint is the one with the lowest val_loss"
            rank_zero_info(f"{type(pl_module).__name__} does not log val_acc: {kept}")
            self._minimise(loss)
        super().on_validation_end(trainer, pl_module)
        is_probed = trainer.global_step == 0 and self.monitor is not None
        if is_probed and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        # early stopping may end training after a validation within an epoch
        if not trainer.is_last_batch:
            self._save_if_stopped(trainer)

    def _minimise(self, metric: str | None) -> None:
        self.monitor = metric
        self.mode = "min"
        self.kth_value = torch.tensor(torch.inf)


def find_checkpoint(
    name: str, configs: Sequence[str], root: str, run: str, resumes: bool = False
) -> str:
    """Resolve `last`, `best` and a run's folder to the path of a checkpoint.

    A file's path is returned unchanged.

    A config file in a run's directory selects that run. Otherwise, the newest checkpoint of
    this name under `root/run` is used.

    Args:
        name: `last`, `best` or a path.
        configs: Config files of the command line.
        root: Directory of all runs.
        run: Name of the runs: `--run.name` or its default. Several runs may share it.
        resumes: Whether a run's folder stands for its last checkpoint instead of its best.

    Raises:
        UserError: When the checkpoint is missing or damaged.
    """
    path = checkpoint_of(Path(name), resumes)
    if name in ("last", "best"):
        kept = Path()
        folders = Path(root, run).glob("version_*/checkpoints")
        for config in configs:
            file = Path(config).with_name("run.json")
            if file.is_file():
                kept = Path(getattr(read_earlier(file).checkpoint, name) or "")
                folders = file.parent.glob("checkpoints")
        matches = [kept]
        # the run may have been moved since its record was written, or killed in its first epoch
        if not kept.is_file():
            matches = [
                path
                for path in _newest_first(folders)
                if path.name == kept.name or path.stem.startswith(name)
            ]
        if not matches:
            raise UserError(
                f"--ckpt_path {name}: no {name}.ckpt under {Path(root, run)}: give --run.name, or "
                "a file's path"
            )
        path = matches[0]
    check_exists(path, FLAG)
    reason = _wrong_with(path)
    if reason:
        remedy = "give another one"
        for other in reversed(_newest_first([path.parent])):
            if not _wrong_with(other):
                remedy = f"use {other}"
        raise UserError(f"{reason}: {remedy}")
    return str(path)


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    paths = chain.from_iterable(folder.glob("*.ckpt") for folder in folders)
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _wrong_with(path: Path, whole: bool = False) -> str | None:
    """Return the reason why a checkpoint is unusable, or None.

    If `whole` is set, a checkpoint that holds only weights is unusable, too.
    """
    try:
        checkpoint = read(path)
    except UserError as error:
        return str(error)
    if whole and not checkpoint.keys() >= {"loops", "optimizer_states"}:
        return f"{path}: {WEIGHTS_ALONE}"
    return None


def newest_checkpoint(runs: Path, of: tuple[str, list[str]] | None) -> str | None:
    """Return the newest checkpoint that training can resume from, or None if no checkpoint exists.

    Rename damaged checkpoints that are newer than the returned one to `*.damaged`.

    Args:
        runs: Folder with the runs of one name.
        of: Command line and launcher ids. Only runs with this command line and one of these
            launchers are searched; None searches all runs.

    Raises:
        UserError: When checkpoints exist, but training can resume from none of them.
    """
    folders = []
    for folder in runs.glob("version_*/checkpoints"):
        if of is not None:
            command, launchers = of
            record = read_earlier(folder.with_name("run.json"))
            if record.command != command or set(launchers).isdisjoint(record.launchers):
                continue
        folders.append(folder)
    damaged: list[Path] = []
    paths = _newest_first(folders)
    for path in paths:
        reason = _wrong_with(path, whole=True)
        if reason is None:
            for other in damaged:
                aside = other.replace(other.with_name(f"{other.name}.damaged"))
                rank_zero_info(
                    f"{other} is damaged: it is kept as {aside.name}, and the run continues from "
                    f"{path}"
                )
            return str(path)
        rank_zero_info(reason)
        if not reason.endswith(WEIGHTS_ALONE):
            damaged.append(path)
    if paths:
        raise UserError(
            f"training can resume from none of the {len(paths)} checkpoints under {runs}: "
            "give another --run.name to begin anew, or --ckpt_path with another checkpoint"
        )
    return None


def is_newest(path: Path) -> bool:
    """Return whether a checkpoint is the newest of its run; ignore newer `best` checkpoints."""
    files = _newest_first([path.parent])
    return path == next(file for file in files if file == path or file.stem != "best")


def read_earlier(path: Path) -> Record:
    """Read an earlier run's record. If the file is missing or unreadable, return an empty record.

    Print the reason why a file is unreadable.
    """
    if not path.exists():
        return Record()
    try:
        return Record.load(path)
    except ValueError as error:
        rank_zero_info(f"{error}: continuing without it")
        return Record()


def check_checkpoint(
    path: str,
    model: LightningModule,
    data: LightningDataModule,
    trainer: Trainer | None,
    may_be_finished: bool,
) -> None:
    """Check that a checkpoint fits the data, and that training can resume from it.

    Whether its weights fit the model is known when Lightning loads them.

    Args:
        path: Path of the checkpoint.
        model: The model.
        data: The data module.
        trainer: Trainer that resumes the checkpoint's training, or None.
        may_be_finished: Accept a checkpoint whose training has already reached `max_epochs` or
            `max_steps`.

    Raises:
        UserError: When the file is missing or damaged, or training cannot resume from it. When
            classes or optimizer settings differ; the message names a difference.
            When the checkpoint's training has already reached `max_epochs` or `max_steps`, and
            `may_be_finished` is false.
    """
    checkpoint = read(Path(path))
    classes = (checkpoint.get("images") or {}).get("class_names")
    if classes and isinstance(data, ImageData) and classes != list(data.class_names):
        difference = sorted(set(classes).symmetric_difference(data.class_names))
        raise UserError(
            f"--ckpt_path {path} was trained on other classes "
            f"({listed(difference) or 'in another order'}) than --data has: give images with the "
            "same class names"
        )
    if trainer is None:
        return
    try:
        loop = checkpoint["loops"]["fit_loop"]
        steps = checkpoint["global_step"]
        epochs = loop["epoch_progress"]["current"]["processed"]
        state = loop.get("epoch_loop.state_dict", {})
        progress = loop["epoch_loop.batch_progress"]
        trained = progress["current"]["processed"]
        is_last = progress["is_last_batch"]
        optimizers = checkpoint["optimizer_states"]
        group = dict(optimizers[0]["param_groups"][0]) if optimizers else {}
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"--ckpt_path {path}: training cannot resume from it (it has no {error}): give another"
        ) from error
    for done, limit, unit in (
        (epochs, trainer.max_epochs, "epochs"),
        (steps, trainer.max_steps, "steps"),
    ):
        if not may_be_finished and reaches(done, limit):
            raise UserError(
                f"--ckpt_path {path} has been trained for {done} {unit}, "
                f"as many as --trainer.max_{unit} {limit}: give more"
            )
    every = trainer.accumulate_grad_batches
    if trained % every and not is_last:
        raise UserError(
            f"--trainer.accumulate_grad_batches {every}: {path} was saved after batch {trained} "
            "of an epoch, inside an optimizer step: give another one, or the number that it was "
            "trained with"
        )
    # another number of shards or threads rounds sums differently
    for name, value in getattr(trainer.fit_loop.epoch_loop, "kept", {}).items():
        if state.get(name, value) != value:
            raise UserError(
                f"--run.{name} {value}: {path} was trained with {state[name]}, which affects "
                f"rounding: give --run.{name} {state[name]}, or leave --run.virtual_devices out"
            )
    has_own = is_overridden("configure_optimizers", model, ImageClassifier)
    if isinstance(model, ImageClassifier) and not has_own:
        _check_optimizer(group, model)


def _check_optimizer(saved: dict[str, Any], model: ImageClassifier) -> None:
    here = model.make_optimizer().param_groups[0]
    # do not compare settings that schedulers change
    ignored = {"params", *IMPLEMENTATION}
    if "initial_lr" in saved:
        ignored |= {"lr", "momentum", "betas"}
    for key in here.keys() - ignored:
        value = saved.get(key, "missing")
        if value != here[key]:
            raise UserError(
                f"--model.optimizer.{key} {here[key]}: a resumed run uses the checkpoint's "
                f"optimizer, whose value is {value}: give its settings, or start a new run"
            )
