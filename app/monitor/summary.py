"""Printed lines about a run: one for each epoch, and a summary at the end."""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning.pytorch.loggers import Logger

from app.launch.cluster_environment import OWN_AGENT
from app.monitor.loggers import trackers
from app.monitor.rank_times import slow_ranks
from app.record import Epoch, Metrics, Record
from app.record.words import accuracy, duration, time_taken
from app.system.trust import trust_flags


def report(
    record: Record, loggers: Iterable[Logger], fitted: bool, use: str | None = "test"
) -> Iterator[str]:
    """Yield the lines of a run's summary: results, files, and next commands.

    Args:
        record: The run record.
        loggers: The run's loggers.
        fitted: Whether the command was `fit`.
        use: Command to suggest for the best checkpoint, such as `test`, or None.
    """
    directory = Path(str(record.run_dir))
    best = record.best_epoch
    if record.status != "completed":
        yield f"{record.status:<15} {record.error}"
    if record.not_finite_since is not None:
        epoch = record.not_finite_since + 1
        yield f"training loss   not finite since epoch {epoch}: the run has diverged"
    if record.validation:
        place = f"  (epoch {best.epoch + 1})" if best else ""
        yield f"validation      {_figures(record.validation)}{place}"
    if record.test:
        tested = Path(record.tested or "last weights").name
        yield f"test            {_figures(record.test)}  ({tested})"
    elif fitted and not record.tested and use != "test":
        yield "test            none: there are no test images, or the model has no test_step"
    if fitted and record.train_s is not None and record.setup_s is not None:
        yield f"time            {time_taken(record)}"
        for slow in slow_ranks(record.ranks).values():
            yield f"slow            {slow}: the others wait for it in every step"
    kept = sorted(path.name for path in directory.iterdir() if path.name != "wandb")
    yield f"files           {directory}: {', '.join(kept)}"
    for tracker in trackers(loggers):
        yield f"tracked         {tracker.where()}"
    if fitted and record.checkpoint.last:
        yield from _commands(record, directory, use)


def _commands(record: Record, directory: Path, use: str | None) -> Iterator[str]:
    """Yield the commands to resume the training, to use it, and to train longer."""
    flags = shlex.join([*trust_flags(), "--config", f"{directory}/config.yaml"])
    resume = f"python -m app fit {flags}"
    here = ""
    launched = [launcher for launcher in record.launchers if not launcher.startswith(OWN_AGENT)]
    if record.num_nodes > 1 or launched:
        resume = "the same command, with"
        here = " --trainer.num_nodes 1 --trainer.strategy auto --trainer.devices 1"
    resume += f" --ckpt_path {shlex.quote(str(record.checkpoint.last))}"
    if not record.finished:
        yield f"resume          {resume}"
        return
    if record.checkpoint.best and use:
        checkpoint = shlex.quote(record.checkpoint.best)
        yield f"use it          python -m app {use} {flags}{here} --ckpt_path {checkpoint}"
    longer = f"--trainer.max_epochs {2 * len(record.epochs)}"
    if record.ended_by_steps:
        longer = f"--trainer.max_steps {2 * record.steps}"
    yield f"train longer    {resume} {longer}"


HIDDEN = ("train_acc", "val_f1")  # metrics that the line does not show


def epoch_line(
    row: Epoch, epochs: int | None, is_best: bool, memory: float, left: float | None
) -> str:
    """Format the line that is printed after an epoch, aligned with other epochs' lines.

    Args:
        row: The epoch's row of the run record.
        epochs: Number of epochs, or None if unknown.
        is_best: Whether the epoch has the best accuracy so far.
        memory: Peak memory of this process, GiB.
        left: Seconds to the end of training, or None if unknown.
    """
    number = str(row.epoch + 1)
    if epochs and epochs > 0:
        number += f"/{epochs}"
    width = 2 * len(str(epochs or 0)) + 1
    texts = [f"epoch {number:>{width}}"]
    if row.epoch < 0:
        texts.append(f"probe {duration(row.seconds or 0.0)}")
    if row.train_loss is not None:
        texts.append(f"train {row.train_loss:.3f}")
    if row.val_loss is not None:
        texts.append(f"val {row.val_loss:.3f}")
    if row.val_acc is not None:
        star = "*" if is_best else " "
        texts.append(f"acc {100 * row.val_acc:5.1f} % {star}")
    for name, value in row.metrics.items():
        if name not in HIDDEN:
            texts.append(f"{name} {value:.4g}")
    if row.lr is not None:
        texts.append(f"lr {row.lr:.3g}")
    if row.samples_per_s:
        texts.append(f"{row.samples_per_s:,.0f}/s")
    texts.append(f"{memory:.1f} GiB")
    if left:
        texts.append(f"{duration(left)} left")
    if not row.whole:
        texts.append("(in part)")
    return "  ".join(texts)


def _figures(metrics: Metrics) -> str:
    texts = []
    if metrics.acc is not None:
        texts.append(f"accuracy {accuracy(metrics.acc, metrics.samples)}")
    if metrics.loss is not None:
        texts.append(f"loss {metrics.loss:.4f}")
    return ", ".join(texts)
