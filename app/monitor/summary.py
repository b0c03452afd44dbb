"""Printed lines about a run: one for each epoch, and a summary at the end."""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from app.launch.cluster_environment import OWN_AGENT
from app.launch.process import trust_flags
from app.monitor.loggers import trackers
from app.monitor.rank_times import slow_ranks
from app.record import Epoch, Metrics, Record
from app.record.words import duration, percent, taken_cores


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
    speed = record.throughput
    epochs = record.epochs
    validated = [row for row in epochs if row.val_acc is not None]
    if record.status != "completed":
        yield f"{record.status:<15} {record.error}"
    if record.not_finite_since is not None:
        yield f"training loss   not finite since epoch {record.not_finite_since + 1}: the run has diverged"
    if validated:
        best = max(validated, key=lambda row: row.val_acc or 0.0)
        yield f"validation      best accuracy {percent(best.val_acc or 0.0)}, in epoch {best.epoch + 1}"
    if record.test:
        tested = Path(record.tested).name if record.tested else "last weights"
        yield f"test            {_figures(record.test)}  ({tested})"
    elif fitted and not record.tested and use != "test":
        yield "test            none: there are no test images, or the model has no test_step"
    if record.validation:
        yield f"validation      {_figures(record.validation)}"
    if fitted and record.train_s is not None and record.setup_s is not None:
        windows = f"{speed.n} window{'s' * (speed.n != 1)}"
        rate = f", {speed.median:,.0f} samples/s (median of {windows})" if speed.median else ""
        whole = f" in {len(record.parts) + 1} parts" if record.parts else ""
        trained = duration(record.train_s)
        before = duration(record.setup_s)
        taken = taken_cores(record.others_cores, record.hardware)
        others = f"; other programs took {taken}" if taken else ""
        yield f"time            {trained} training{whole}, {before} set-up{rate}{others}"
        for slow in slow_ranks(record.ranks).values():
            yield f"slow            {slow}: the others wait for it in every step"
    kept = sorted(path.name for path in directory.iterdir() if path.name != "wandb")
    yield f"files           {directory}: {', '.join(kept)}"
    for tracker in trackers(loggers):
        yield f"tracked         {tracker.where()}"
    if fitted and record.checkpoint.last:
        again = shlex.join([*trust_flags(), "--config", f"{directory}/config.yaml"])
        alone = record.num_nodes == 1 and all(
            launcher.startswith(OWN_AGENT) for launcher in record.launchers
        )
        resume = f"python -m app fit {again}" if alone else "the same command, with"
        resume += f" --ckpt_path {shlex.quote(record.checkpoint.last)}"
        if not record.finished:
            yield f"resume          {resume}"
            return
        if record.checkpoint.best and use:
            here = (
                ""
                if alone
                else " --trainer.num_nodes 1 --trainer.strategy auto --trainer.devices 1"
            )
            checkpoint = shlex.quote(record.checkpoint.best)
            yield f"use it          python -m app {use} {again}{here} --ckpt_path {checkpoint}"
        by_steps = 0 <= (record.max_steps or -1) <= record.steps
        more = (
            f"--trainer.max_steps {2 * record.steps}"
            if by_steps
            else f"--trainer.max_epochs {2 * len(epochs)}"
        )
        yield f"train longer    {resume} {more}"


def epoch_line(
    row: Epoch,
    epochs: int | None,
    metrics: Mapping[str, Any],
    is_best: bool,
    memory: float,
    left: float | None,
) -> str:
    """Format the line that is printed after an epoch. Pad epoch number and accuracy to align the lines.

    Args:
        row: The epoch's row of the run record.
        epochs: Number of epochs, or None if unknown.
        metrics: The epoch's metrics, by name.
        is_best: Whether the epoch has the best accuracy so far.
        memory: Peak memory of this process, GiB.
        left: Seconds to the end of training, or None if unknown.
    """
    number = f"{row.epoch + 1}/{epochs}" if epochs and epochs > 0 else str(row.epoch + 1)
    hidden = re.compile(r".*_step|lr-.*|train_(acc|loss)|val_(acc|loss|f1)")
    texts = [
        f"epoch {number:>{2 * len(str(epochs or 0)) + 1}}",
        f"train {row.train_loss:.3f}" if row.train_loss is not None else "",
        f"val {row.val_loss:.3f}" if row.val_loss is not None else "",
        f"acc {100 * row.val_acc:5.1f} % {'*' if is_best else ' '}"
        if row.val_acc is not None
        else "",
        *(f"{name} {float(metrics[name]):.4g}" for name in metrics if not hidden.fullmatch(name)),
        f"lr {row.lr:.3g}" if row.lr is not None else "",
        f"{row.samples_per_s:,.0f}/s" if row.samples_per_s else "",
        f"{memory:.1f} GiB",
        f"{duration(left)} left" if left else "",
        "" if row.whole else "(in part)",
    ]
    return "  ".join(filter(None, texts))


def _figures(metrics: Metrics) -> str:
    texts = [f"accuracy {percent(metrics.acc)}"] if metrics.acc is not None else []
    if metrics.loss is not None:
        texts.append(
            f"loss {metrics.loss:.4f}" if math.isfinite(metrics.loss) else "loss not finite"
        )
    return ", ".join(texts)
