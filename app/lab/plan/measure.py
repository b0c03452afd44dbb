"""Measurement of a training step on one device, and of when its gradients are ready."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.command.configuration import build, resolve
from app.data.module import ImageData
from app.errors import UserError
from app.lab.plan.cost_model import Timed
from app.lab.runs import run_fit
from app.modules import ImageClassifier
from app.record import Record
from app.record.words import taken_cores
from app.system.machine import time_when_done

ONE_DEVICE = (  # flags of a run of 30 steps on one device, without checkpoints or tracking
    "--trainer.devices=1",
    "--trainer.num_nodes=1",
    "--trainer.strategy=auto",
    "--trainer.max_epochs=-1",
    "--trainer.max_steps=30",
    "--trainer.limit_train_batches=30",
    "--trainer.limit_val_batches=1",
    "--trainer.enable_checkpointing=false",
    "--trainer.fast_dev_run=false",
    "--trainer.barebones=false",
    "--trainer.log_every_n_steps=5",
    "--run.warmup_epochs=0",
    "--run.wandb=false",
)
TIMEOUT = 300.0  # of a run, in seconds


def measure_steps(
    arguments: list[str], say: Callable[[str], None] = lambda activity: None
) -> list[Timed]:
    """Measure 30 steps on one device with the global batch, a quarter, and a sixteenth of it.

    Args:
        arguments: The arguments of `python -m app`, beginning with `fit`.
        say: Function called with a description of each measurement.

    Returns:
        The measurements, the global batch's first.

    Raises:
        UserError: When a run fails.
    """
    say("measuring steps on one device")
    record = timed_run(arguments)
    batch = record.global_batch_size
    if batch is None:
        raise UserError("plan needs data of this application, to read the batch size: give --data")
    measured = [timed(record)]
    for size in sorted({max(batch // 4, 1), max(batch // 16, 1)} - {batch}, reverse=True):
        say(f"measuring steps on one device with batches of {size}")
        measured.append(timed(timed_run([*arguments, "--data.batch_size", str(size)])))
    return measured


def timed_run(arguments: list[str]) -> Record:
    """Train for 30 steps on one device, and return the record.

    Args:
        arguments: The arguments of `python -m app`, beginning with `fit`.

    Raises:
        UserError: When the run fails, or its steps were not timed.
    """
    record = run_fit([*arguments[1:], *ONE_DEVICE], TIMEOUT)
    if record.time_limit is not None:
        raise UserError(f"30 steps on one device took more than {TIMEOUT:g} s: use a smaller model")
    if record.status != "completed":
        raise UserError(str(record.error))
    if record.time_per_step is None:
        raise UserError("the steps could not be timed: leave --trainer.profiler out")
    return record


def timed(record: Record) -> Timed:
    """Convert a run record to step times, with the number of images per device."""
    rates = record.throughput
    windows = (1.0, 1.0)
    if rates.median and rates.min and rates.max:
        windows = rates.median / rates.max, rates.median / rates.min
    assert record.global_batch_size
    assert record.time_per_step
    taken = taken_cores(record.others_cores, record.hardware)
    return Timed(
        record.global_batch_size / record.replicas, vars(record.time_per_step), windows, taken
    )


def read_record(path: str) -> Record:
    """Read the record of a run for `--run`.

    Raises:
        UserError: When the record is missing or lacks a field, or the run was under dp.
    """
    file = Path(path) if path.endswith(".json") else Path(path, "run.json")
    try:
        record = Record.load(file)
    except ValueError as error:
        raise UserError(f"--run {path}: {error}: give a run's directory") from error
    for name in ("time_per_step", "global_batch_size", "config", "threads", "peak_memory"):
        if not getattr(record, name):
            raise UserError(
                f"--run {path}: its record has no {name}: give a run of fit of 6 or more steps"
            )
    if record.world_size < record.replicas:
        raise UserError(
            f"--run {path} was under dp, so its step is not one device's: give another run"
        )
    return record


def profile_gradients(arguments: list[str], batch: int) -> tuple[float, list[tuple[int, float]]]:
    """Measure the backward pass's share of the time, and when each gradient is ready.

    Args:
        arguments: The arguments of `python -m app`, beginning with `fit`.
        batch: Number of images of a batch.

    Returns:
        The backward pass's share of the time of both passes, 0…1. Then the gradients, the first
        ready one first: each one's bytes, and the time at which it is ready, as a share of the
        backward pass, 0…1.

    Raises:
        UserError: When the model or the data are not this application's.
    """
    model, data = build(arguments)
    if not isinstance(model, ImageClassifier) or not isinstance(data, ImageData):
        raise UserError("plan needs a model and data of this application: give --model and --data")
    trainer = resolve(arguments).trainer
    device = torch.device("cpu")
    if trainer.accelerator != "cpu":
        device = torch.accelerator.current_accelerator(check_available=True) or device
    is_mixed = str(trainer.precision).endswith("-mixed")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_mixed)
    network = model.network.to(device)
    images = torch.randn(batch, *data.image_shape, device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    wanted = [parameter for parameter in network.parameters() if parameter.requires_grad]
    ready: dict[Tensor, float] = {}

    def note(parameter: Tensor) -> None:
        ready[parameter] = time_when_done(device)

    for parameter in wanted:
        parameter.register_post_accumulate_grad_hook(note)
    passes = []
    for _ in range(12):
        ready.clear()
        began = time_when_done(device)
        with autocast:
            loss = model.recipe.criterion(network(images), labels).mean()
        turned = time_when_done(device)
        loss.backward()
        backward = time_when_done(device) - turned
        shares = [(ready.get(parameter, turned) - turned) / backward for parameter in wanted]
        passes.append([turned - began, backward, *shares])
    forward, backward, *shares = np.mean(passes[2:], axis=0).tolist()
    sizes = [parameter.numel() * parameter.element_size() for parameter in wanted]
    ordered = sorted(zip(sizes, shares, strict=True), key=lambda gradient: gradient[1])
    return backward / (forward + backward), ordered
