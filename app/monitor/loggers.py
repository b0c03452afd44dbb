"""Loggers of metrics: always a CSV file, optionally Weights & Biases."""

import csv
import os
import re
import shlex
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor

from app.errors import UserError, one_line
from app.record import Record
from app.system.files import read_csv, whole, write_csv
from app.system.lightning_patches import open_experiment, tracker_settings
from app.system.patches import expects
from app.system.wandb_patches import forget_run

Prediction = tuple[
    Tensor, str, str, float
]  # image (C, H, W), label, predicted class, its probability
MODES = ("off", "offline", "online")  # tracking modes, the most private first
WANDB_MODES = {
    "disabled": "off",
    "dryrun": "offline",
    "offline": "offline",
    "online": "online",
    "run": "online",
}


def _never_fatal(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a tracker's method so that an exception ends tracking with a warning, and training continues."""

    @wraps(method)
    def call(self: "Tracker", *args: Any, **kwargs: Any) -> None:
        if getattr(rank_zero_only, "rank", 0) != 0 or self.failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed = self.unsent = True
            rank_zero_warn(
                f"Weights & Biases failed, training continues without it: {one_line(str(error))}"
            )

    return call


def tracking_mode(flag: str | bool | None) -> str:
    """Return the tracker's mode: the more private of flag and WANDB_MODE, or `offline` if neither is set.

    Args:
        flag: Value of `--run.wandb`; YAML reads `on` and `off` as booleans.
    """
    requested = ("off", "offline")[flag] if isinstance(flag, bool) else flag
    modes = [
        mode for mode in (requested, WANDB_MODES.get(os.environ.get("WANDB_MODE", ""))) if mode
    ]
    return min(modes, key=MODES.index, default="offline")


def trial() -> str | None:
    """Return the run id that a wandb sweep assigned to this process, or None outside a sweep."""
    return os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None


class Tracker(WandbLogger):
    """Logger for Weights & Biases. One training is one wandb run, whatever its number of processes.

    If the server does not accept the run within 20 seconds, the run is offline. Training never
    waits for uploads, and unsent data stays in the run's directory.

    Args:
        run_dir: Directory of the run; the tracker writes into its `wandb` folder.
        mode: `online` or `offline`.
        resumed: Id of an earlier run to continue.
        options: Name, project, group and tags of the run.

    Attributes:
        id: Id of the run.
        unsent: Whether some data could not be uploaded in time.
    """

    def __init__(self, run_dir: str, mode: str, resumed: str | None = None, **options: Any) -> None:
        variables = {
            "WANDB_ERROR_REPORTING": "false",  # otherwise, even offline runs send usage statistics
            **dict.fromkeys(("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE"), "true"),
            # caches outside the home directory, because wandb prints its log to the terminal if
            # home is read-only
            **dict.fromkeys(
                ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"), os.path.abspath(Path(run_dir, "wandb"))
            ),
        }
        for (
            variable,
            value,
        ) in variables.items():  # environment variables, because they reach spawned processes
            os.environ.setdefault(variable, value)
        import wandb

        self.failed = self.unsent = False
        self.id = trial() or resumed or uuid.uuid4().hex[:8]
        self.mode = mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            rank_zero_info(
                "Weights & Biases has no key (wandb login, or WANDB_API_KEY): offline from here on"
            )
            self.mode = "offline"
        # spawned processes read this variable to attach to the run
        os.environ["WANDB_DIR"] = os.path.abspath(run_dir)
        settings = wandb.Settings(
            init_timeout=20,
            finish_timeout=20,
            finish_timeout_raises=True,
            silent=True,
            console="off",
        )
        options |= {"id": self.id, "resume": "allow" if resumed else None, "settings": settings}
        super().__init__(save_dir=run_dir, mode=self.mode, **options)
        tracker_settings(self).pop(
            "anonymous", None
        )  # Lightning sets this argument, and wandb warns about it

    @property
    def experiment(self) -> Any:
        """The wandb run, started on first access.

        If the run does not start, this is an offline run. If that does not start either, this is a
        stand-in that discards data.
        """
        for fallback in () if self.failed else ("offline", None):
            try:
                return super().experiment
            except Exception as error:
                rank_zero_info(
                    f"Weights & Biases does not start ({one_line(str(error))}): {fallback or 'without it'} from here on"
                )
            # take a new id, because wandb treats the failed run's id as taken
            self.id = trial() or uuid.uuid4().hex[:8]
            self.mode = "offline"
            tracker_settings(self).update(mode=self.mode, id=self.id, resume=None)
        self.failed = True
        self.mode = "disabled"
        return DummyExperiment()

    def __getstate__(self) -> dict[str, Any]:
        import wandb

        # without this call, `wandb.require` in Lightning's `__getstate__` prints a warning
        wandb.setup()
        return super().__getstate__()

    def share_with_forks(self) -> None:
        """Start the run in this process. Processes forked later attach to it, as spawned processes do."""
        state = self.__getstate__()

        def attach() -> None:
            forget_run()
            self.__dict__.update(state)

        os.register_at_fork(after_in_child=attach)

    def where(self) -> str:
        """Return the command that uploads unsent data. If all data is sent, return the run's URL or tracking mode."""
        folders = sorted(Path(str(self.save_dir), "wandb").glob("offline-run-*"))
        if self.unsent:
            folders += sorted(Path(str(self.save_dir), "wandb").glob(f"run-*-{self.id}"))
        if folders:
            return f"offline; upload with  {shlex.join(['wandb', 'sync', *map(str, folders)])}"
        return getattr(open_experiment(self), "url", None) or self.mode

    log_metrics = _never_fatal(WandbLogger.log_metrics)
    log_hyperparams = _never_fatal(WandbLogger.log_hyperparams)
    finalize = _never_fatal(WandbLogger.finalize)

    @_never_fatal
    def log_record(self, record: Record) -> None:
        """Log the run record to the wandb run's summary."""
        self.experiment.summary.update({"run": asdict(record)})

    @_never_fatal
    def log_test_figures(
        self,
        matrix: list[list[int]],
        names: list[str],
        wrong: list[Prediction],
        pictures: list[Path],
    ) -> None:
        """Log the confusion matrix and the most confidently wrong images, as tables and as PNG files."""
        import wandb

        cells = [
            [names[i], names[j], count]
            for i, row in enumerate(matrix)
            for j, count in enumerate(row)
        ]
        self.log_table("confusion_matrix", ["label", "predicted", "count"], cells)
        if wrong:
            rows = [
                [wandb.Image(image.permute(1, 2, 0).squeeze(-1).numpy()), *row]
                for image, *row in wrong
            ]
            self.log_table("most_wrong", ["image", "label", "predicted", "probability"], rows)
        for picture in pictures:
            self.log_image(f"{picture.stem}_picture", [str(picture)])

    @_never_fatal
    def log_comparison(self, table: Any, pictures: dict[str, Path]) -> None:
        """Log the table (a DataFrame) and the pictures of a comparison."""
        self.log_table("results", dataframe=table)
        for title, path in pictures.items():
            self.log_image(path.stem, [str(path)], caption=[title])

    def finish(self) -> None:
        """Finish the run, and upload the remaining data."""
        try:
            run = open_experiment(self)
            if run:
                run.finish()
        except Exception as error:  # TimeoutError, or any exception of the tracker
            self.unsent = True
            rank_zero_info(
                f"Weights & Biases has not received the whole run: {one_line(str(error))}"
            )


def trackers(loggers: Iterable[Logger]) -> list[Tracker]:
    """Return this application's Weights & Biases loggers, without those that a user added."""
    return [logger for logger in loggers if isinstance(logger, Tracker)]


class MetricsFile(CSVLogger):
    """CSV logger that continues the file of a resumed training, and survives a full disk.

    If a write fails, the rows stay in memory until the next save.
    """

    _failed = False

    @property
    def _path(self) -> Path:
        return Path(self.log_dir, "metrics.csv")

    def _rows(self) -> list[dict[str, Any]]:
        """Return the rows of the file.

        Raises:
            UserError: When the file cannot be read.
        """
        try:
            columns, *rows = read_csv(self._path) or [[]]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be read ({error.strerror}): give another --run.name"
            ) from error
        return [dict(zip(columns, row, strict=False)) for row in rows]

    def _write(self, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
        write_csv(self._path, [columns, *([row.get(name, "") for name in columns] for row in rows)])

    @rank_zero_only
    def save(self) -> None:
        """Append the logged rows; rewrite the file if a metric is new. A failed write leaves no partial line."""
        logged = self.experiment
        path = self._path
        columns = sorted({*logged.metrics_keys, *(name for row in logged.metrics for name in row)})
        size = path.stat().st_size if path.exists() else 0
        try:
            if columns != logged.metrics_keys or not size:
                self._write([*self._rows(), *logged.metrics], columns)
            else:
                with path.open("a", newline="") as file:
                    csv.DictWriter(file, columns).writerows(logged.metrics)
            logged.metrics = []
            logged.metrics_keys = columns
        except OSError as error:
            with suppress(OSError):
                os.truncate(path, size)
            if not self._failed:
                rank_zero_info(f"{path} cannot be written ({error.strerror}): training continues")
            self._failed = True

    def go_back(self, step: int) -> None:
        """Drop the rows from `step` on, because training resumes at this step."""
        rows = self._rows()
        if rows:
            self._write([row for row in rows if int(row["step"]) < step], list(rows[0]))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Lightning's CSV writer. Its constructor deletes metrics.csv, so this property restores the earlier rows."""
        if open_experiment(self) is None:
            rows = self._rows()
            super().experiment.metrics = rows
            if rows:
                self.save()
        return open_experiment(self)


@expects(
    *(
        f"{LearningRateMonitor.__module__}:LearningRateMonitor._extract_{what}"
        for what in ("stats", "lr")
    )
)
class RateMonitor(LearningRateMonitor):
    """Monitor that logs the learning rate per epoch, or per logging window if a scheduler changes it on each step."""

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Decide whether to log once per logging window, or only once per epoch."""
        super().on_train_start(trainer, *args, **kwargs)
        by_step = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
        self._logs_windows = self.logging_interval == "step" or (
            self.logging_interval is None and by_step
        )

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Log the learning rate once per logging window, if a scheduler changes it on each step."""
        if self._logs_windows:
            super().on_train_batch_start(*args, **kwargs)

    def _extract_lr(self, param_group: dict[str, Any], name: str) -> dict[str, Any]:
        """Skip a parameter group without a learning rate, as in Hugging Face's Adafactor."""
        return {} if param_group.get("lr") is None else super()._extract_lr(param_group, name)

    def _extract_stats(self, trainer: Any, interval: str) -> dict[str, float]:
        """Keep the rates on the host, because copying each one to a GPU would wait for the GPU."""
        names = ("lr_scheduler_configs", "optimizers", "callback_metrics")
        on_host = {name: getattr(trainer, name) for name in names}
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        return super()._extract_stats(SimpleNamespace(strategy=strategy, **on_host), interval)  # type: ignore[arg-type]


class SaveConfig(SaveConfigCallback):
    """Callback that saves the config in the run's directory and in the tracker, on rank zero only."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any) -> None:
        super().__init__(parser, config, **kwargs)
        self.text = parser.dump(config, skip_none=False, skip_validation=True)
        # drop parser and config, because ddp_spawn pickles this callback into a pipe to each new
        # process. Parser and config take 200 kB, more than the pipe holds. The parent would block
        # until the process reads the pipe, and only then start the next process
        del self.parser, self.config

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write `config.yaml`, and log the config to the tracker."""
        if trainer.logger is None:  # with --trainer.barebones
            return
        path = Path(str(trainer.logger.log_dir), "config.yaml")
        try:
            with whole(path) as file:
                file.write(self.text.encode())
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): give another --run.root"
            ) from error
        for tracker in trackers(trainer.loggers):
            tracker.log_hyperparams(yaml.safe_load(self.text))


def next_version(root: str, name: str, what: str = "version") -> str:
    """Return the next free name in the folder `root/name`, such as `version_3`.

    Args:
        root: Directory of all experiments.
        name: Name of the experiment.
        what: Prefix of the name. `version` counts from 0, another prefix from 1.
    """
    matches = [
        re.fullmatch(rf"{what}_(\d+)", path.name) for path in Path(root, name).glob(f"{what}_*")
    ]
    return f"{what}_{max((int(match[1]) for match in matches if match), default=-(what == 'version')) + 1}"


def claim_version(folder: Path, what: str = "version") -> Path:
    """Create the next `version_N` in a folder; concurrent runs get different numbers.

    Raises:
        UserError: When the folder cannot be created.
    """
    for attempt in range(100):
        directory = folder / next_version(str(folder.parent), folder.name, what)
        try:
            directory.mkdir(parents=True)
            break
        except OSError as error:
            # retry: another run created the same folder, or a rejected run removed the empty parent
            if attempt == 99 or not isinstance(error, FileExistsError | FileNotFoundError):
                raise UserError(
                    f"{directory} cannot be created ({error.strerror}): give another --run.root"
                ) from error
    return directory


def make_loggers(
    folder: Path,
    mode: str,
    project: str,
    group: str | None,
    tags: Sequence[str] | None,
    resumed: str | None = None,
) -> list[Logger]:
    """Return the CSV logger and, unless `mode` is `off`, the tracker.

    The CSV logger comes first, because the Trainer takes the run's directory from its first logger.

    Args:
        folder: Directory of the run.
        mode: `off`, `offline` or `online`.
        project: Project of the wandb run.
        group: Group of the wandb run.
        tags: Tags of the wandb run.
        resumed: Id of an earlier wandb run to continue.
    """
    version = folder.name
    name = folder.parent.name
    loggers: list[Logger] = [MetricsFile(str(folder.parent.parent), name=name, version=version)]
    if mode != "off":
        options = {"name": f"{name}/{version}", "project": project, "group": group, "tags": tags}
        try:
            loggers.append(Tracker(str(folder), mode, resumed, **options))
        except Exception as error:
            rank_zero_warn(
                f"Weights & Biases does not start, training continues without it: {one_line(str(error))}"
            )
    return loggers
