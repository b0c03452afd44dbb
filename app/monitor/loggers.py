"""Loggers of metrics: always a CSV file, optionally Weights & Biases."""

import csv
import os
import shlex
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from app.errors import UserError, one_line
from app.record import Record
from app.system.files import read_csv, write_csv, write_text
from app.system.patches import expects
from app.system.wandb_patches import forget_run

MODES = ("off", "offline", "online")  # tracking modes, the most private first
WANDB_MODES = {"disabled": "off", "dryrun": "offline", "offline": "offline", "online": "online"}


def _never_fatal(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a tracker's method so that an exception ends tracking with a warning, not training."""

    @rank_zero_only
    @wraps(method)
    def call(self: "Tracker", *args: Any, **kwargs: Any) -> None:
        if self.failed:
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
    """Return the tracker's mode: the more private of flag and WANDB_MODE, by default `offline`.

    Args:
        flag: Value of `--run.wandb`; YAML reads `on` and `off` as booleans.
    """
    if flag is True:
        flag = "offline"
    elif flag is False:
        flag = "off"
    variable = WANDB_MODES.get(os.environ.get("WANDB_MODE", ""))
    return min(filter(None, (flag, variable)), key=MODES.index, default="offline")


def trial() -> str | None:
    """Return the run id that a wandb sweep assigned to this process, or None outside a sweep."""
    return os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None


@expects(
    "lightning.pytorch.loggers.wandb:WandbLogger._wandb_init",  # arguments for `wandb.init`
    "lightning.pytorch.loggers.wandb:WandbLogger._experiment",  # the open run, or None
)
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
        folder = os.path.abspath(run_dir)
        cache = os.path.join(folder, "wandb")
        variables = {  # environment variables, because they reach spawned processes
            "WANDB_ERROR_REPORTING": "false",  # otherwise, even offline runs send usage statistics
            "WANDB_SILENT": "true",
            "WANDB_DISABLE_GIT": "true",
            "WANDB_DISABLE_CODE": "true",
            # not in the home directory, because wandb prints its log if home is read-only
            "WANDB_CACHE_DIR": cache,
            "WANDB_DATA_DIR": cache,
        }
        for variable, value in variables.items():
            os.environ.setdefault(variable, value)
        import wandb

        wandb.util.pd_available = False  # to know a DataFrame, it need not import pandas
        self.failed = self.unsent = False
        self.id = trial() or resumed or uuid.uuid4().hex[:8]
        self.mode = mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            rank_zero_info(
                "Weights & Biases has no key (wandb login, or WANDB_API_KEY): offline from here on"
            )
            self.mode = "offline"
        os.environ["WANDB_DIR"] = folder  # spawned processes attach to the run in this folder
        settings = wandb.Settings(
            init_timeout=20, finish_timeout=20, finish_timeout_raises=True, console="off"
        )
        options |= {"id": self.id, "resume": "allow" if resumed else None, "settings": settings}
        super().__init__(save_dir=run_dir, mode=self.mode, **options)
        # wandb warns about this argument of Lightning
        self._wandb_init.pop("anonymous", None)

    @property
    def experiment(self) -> Any:
        """The wandb run, started on first access.

        If the run does not start, this is an offline run. If that does not start either, this is a
        stand-in that discards data.
        """
        if self.failed:
            return DummyExperiment()
        for fallback in ("offline", "without it"):
            try:
                return super().experiment
            except Exception as error:
                reason = one_line(str(error))
            rank_zero_info(f"Weights & Biases does not start ({reason}): {fallback} from here on")
            # take a new id, because wandb treats the failed run's id as taken
            self.id = trial() or uuid.uuid4().hex[:8]
            self.mode = "offline"
            self._wandb_init.update(mode=self.mode, id=self.id, resume=None)
        self.failed = True
        self.mode = "disabled"
        return DummyExperiment()

    def __getstate__(self) -> dict[str, Any]:
        import wandb

        # without this call, `wandb.require` in Lightning's `__getstate__` prints a warning
        wandb.setup()
        return super().__getstate__()

    def share_with_forks(self) -> None:
        """Start the run in this process. Processes forked later attach to it, like spawned ones."""
        state = self.__getstate__()

        def attach() -> None:
            forget_run()
            self.__dict__.update(state)

        os.register_at_fork(after_in_child=attach)

    def where(self) -> str:
        """Return the command that uploads unsent data, or else the run's URL or tracking mode."""
        root = Path(str(self.save_dir), "wandb")
        folders = sorted(root.glob("offline-run-*"))
        if self.unsent:
            folders += sorted(root.glob(f"run-*-{self.id}"))
        if folders:
            return f"offline; upload with  {shlex.join(['wandb', 'sync', *map(str, folders)])}"
        return getattr(self._experiment, "url", None) or self.mode

    log_metrics = _never_fatal(WandbLogger.log_metrics)
    log_hyperparams = _never_fatal(WandbLogger.log_hyperparams)
    finalize = _never_fatal(WandbLogger.finalize)

    @_never_fatal
    def log_record(self, record: Record) -> None:
        """Log the run record to the wandb run's summary."""
        self.experiment.summary.update({"run": asdict(record)})

    @_never_fatal
    def log_pictures(self, pictures: Iterable[Path]) -> None:
        """Log PNG files."""
        for picture in filter(Path.exists, pictures):
            self.log_image(f"{picture.stem}_picture", [str(picture)])

    def finish(self) -> None:
        """Finish the run, and upload the remaining data."""
        try:
            if self._experiment:
                self._experiment.finish()
        except Exception as error:  # TimeoutError, or any exception of the tracker
            self.unsent = True
            reason = one_line(str(error))
            rank_zero_info(f"Weights & Biases has not received the whole run: {reason}")


def trackers(loggers: Iterable[Logger]) -> list[Tracker]:
    """Return this application's Weights & Biases loggers, without those that a user added."""
    return [logger for logger in loggers if isinstance(logger, Tracker)]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a metrics.csv; no rows if the file is missing.

    Raises:
        OSError: When the file cannot be read.
    """
    if not path.exists():
        return []
    columns, *rows = read_csv(path) or [[]]
    return [dict(zip(columns, row, strict=False)) for row in rows]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write rows to a CSV file, and return its columns: all that a row has, sorted.

    Raises:
        OSError: When the file cannot be written.
    """
    columns = sorted(set().union(*rows))
    lines = [columns]
    for row in rows:
        lines.append([row.get(name, "") for name in columns])
    write_csv(path, lines)
    return columns


class MetricsFile(CSVLogger):
    """CSV logger that continues the file of a resumed training, and survives a full disk.

    If a write fails, the rows stay in memory until the next save.

    Args:
        folder: Folder of the run.

    Attributes:
        rows: All rows, on every rank of a live run; else None.
    """

    rows: list[dict[str, Any]] | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.parent.parent, folder.parent.name, folder.name)
        self._path = folder / "metrics.csv"
        self._columns: list[str] = []  # of the file, once this process has written it
        self._logged: list[dict[str, Any]] = []  # rows to write

    @property
    def experiment(self) -> Any:
        """A stand-in for Lightning's CSV writer, which would delete a resumed training's file."""
        return DummyExperiment()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row; the Trainer then calls `save`."""
        if step is None:
            step = len(self._logged)
        row = {"step": step, **convert_tensors_to_scalars(metrics)}
        if self.rows is not None:
            self.rows.append(row)
        self._log(row)

    @rank_zero_only
    def _log(self, row: dict[str, Any]) -> None:
        self._logged.append(row)

    @rank_zero_only
    def save(self) -> None:
        """Append the logged rows; rewrite the file if a metric is new. Leave no partial line."""
        rows = self._logged
        if not rows:
            return
        size = 0
        try:
            if self._path.exists() and set().union(*rows) <= set(self._columns):
                size = self._path.stat().st_size
                with self._path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns).writerows(rows)
            else:
                self._columns = write_rows(self._path, [*read_rows(self._path), *rows])
            self._logged = []
        except OSError as error:
            if size:
                with suppress(OSError):
                    os.truncate(self._path, size)
            rank_zero_warn(f"{self._path} cannot be written ({error.strerror}): training continues")

    def finalize(self, status: str) -> None:
        """Write the remaining rows."""
        self.save()

    @rank_zero_only
    def rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows.

        Raises:
            OSError: When the file cannot be written.
        """
        self._columns = write_rows(self._path, rows)

    def go_back(self, step: int) -> int:
        """Drop the rows from `step` on, because training resumes at this step.

        Returns:
            Number of steps to repeat, as far as rows tell: those of a step's rate precede it.

        Raises:
            OSError: When the file cannot be read or written.
        """
        rows = read_rows(self._path)
        self.rewrite([row for row in rows if int(row["step"]) < step])
        return max([step, *(int(row["step"]) for row in rows)]) - step


class SaveConfig(SaveConfigCallback):
    """Callback that saves the config in the run's directory and in the tracker, on rank zero."""

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
        write_text(Path(str(trainer.logger.log_dir), "config.yaml"), self.text)
        for tracker in trackers(trainer.loggers):
            tracker.log_hyperparams(yaml.safe_load(self.text))


def next_version(folder: Path, what: str = "version") -> str:
    """Return the next free name in a folder, such as `version_3`.

    Args:
        folder: Folder of an experiment.
        what: Prefix of the name. `version` counts from 0, another prefix from 1.
    """
    first = 0 if what == "version" else 1
    numbers = [first - 1]
    for path in folder.glob(f"{what}_*"):
        number = path.name.removeprefix(f"{what}_")
        if number.isdecimal():
            numbers.append(int(number))
    return f"{what}_{max(numbers) + 1}"


def claim_version(folder: Path, what: str = "version") -> Path:
    """Create the next `version_N` in a folder; concurrent runs get different numbers.

    Raises:
        UserError: When the folder cannot be created.
    """
    for _ in range(100):
        directory = folder / next_version(folder, what)
        try:
            directory.mkdir(parents=True)
            return directory
        except OSError as error:
            # retry: another run created the same folder, or a rejected run removed the empty parent
            reason = error.strerror
    raise UserError(f"{directory} cannot be created ({reason}): give another --run.root")


def make_loggers(
    folder: Path, mode: str, resumed: str | None = None, **options: Any
) -> list[Logger]:
    """Return the CSV logger and, unless `mode` is `off`, the tracker.

    The CSV logger comes first, because the Trainer takes the run's directory from its first logger.

    Args:
        folder: Directory of the run.
        mode: `off`, `offline` or `online`.
        resumed: Id of an earlier wandb run to continue.
        options: Project, group and tags of the wandb run.
    """
    loggers: list[Logger] = [MetricsFile(folder)]
    if mode != "off":
        name = f"{folder.parent.name}/{folder.name}"
        try:
            loggers.append(Tracker(str(folder), mode, resumed, name=name, **options))
        except Exception as error:
            reason = one_line(str(error))
            rank_zero_warn(
                f"Weights & Biases does not start, training continues without it: {reason}"
            )
    return loggers
