"""What is said at the end of a run."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from app.tracking import Tracker


def report(record: dict[str, Any], loggers: Iterable[Logger], fitted: bool) -> Iterator[str]:
    """Lines that tell how a run went, where its files are and what to try next.

    Args:
        record: The run record.
        loggers: The run's loggers.
        fitted: Whether it was a training.
    """
    directory = record["run_dir"]
    losses, speed, test = record.get("train_loss"), record["throughput"], record["test"]
    accuracies = [row["val_acc"] for row in record["epochs"] if row["val_acc"] is not None]
    if losses and None not in losses.values():
        steps = " -> ".join(f"{loss:.4f}" for loss in losses.values())
        yield f"training loss   {steps}  (first, middle, last of {len(record['epochs'])} epochs)"
    if accuracies:
        yield f"validation      best accuracy {max(accuracies):.2%}"
    if test:
        which = "best checkpoint" if (record["checkpoint"] or {}).get("best") or not fitted else "last weights"
        figures = [f"accuracy {test['acc']:.2%}"] if "acc" in test else []
        figures += [f"loss {_number(test['loss'])}"] if "loss" in test else []
        yield f"test            {', '.join(figures)}  ({which})"
    if fitted and record["train_s"] is not None:
        rate = f", {speed['median']:,.0f} samples/s (median of {speed['n']} windows)" if speed["median"] else ""
        yield f"time            {record['train_s']:.1f} s training, {record['setup_s']:.1f} s set-up{rate}"
    kept = sorted(path.name for path in Path(directory).iterdir() if path.name != "wandb")
    yield f"files           {directory}: {', '.join(kept)}"
    for logger in loggers:
        if isinstance(logger, Tracker):
            yield f"tracked         {logger.where()}"
    if fitted and record["checkpoint"] and record["checkpoint"]["last"]:
        again = f"--config {directory}/config.yaml"
        if test and record["checkpoint"]["best"]:
            yield f"use it          python -m app predict {again} --ckpt_path {record['checkpoint']['best']}"
        longer = f"--ckpt_path last --trainer.max_epochs {2 * len(record['epochs'])}"
        yield f"go on           python -m app fit {again} {longer}"
        yield f"other ways      python -m app fit {again} --trainer.strategy dp --trainer.devices 2"


def _number(value: float | None) -> str:
    """Four decimals; the record has null where a loss was not finite."""
    return "not finite" if value is None else f"{value:.4f}"
