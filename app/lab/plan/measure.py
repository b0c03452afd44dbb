"""Measurement of a training step on one device, and of when its gradients are ready."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from app.command.configuration import build, resolve
from app.command.resolved import Resolved
from app.data.module import ImageData
from app.errors import UserError
from app.lab.plan.cost_model import Step, fit_step, make_buckets
from app.lab.runs import run_fit
from app.modules import ImageClassifier
from app.record import Record
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


def measure_step(
    arguments: list[str], records: list[Record], resolved: Resolved, say: Callable[[str], None]
) -> tuple[Step, int]:
    """Return the step of a training on one device, and its global batch size.

    Args:
        arguments: The arguments of `python -m app`, beginning with `fit`.
        records: Runs that measured the step. Without any, measure 30 steps with the global batch, a
            quarter, and a sixteenth of it.
        resolved: Configuration of the arguments.
        say: Function called with a description of each measurement.

    Raises:
        UserError: When the model or the data are not this application's, or a run fails.
    """
    model, data = build(arguments)
    if not isinstance(model, ImageClassifier) or not isinstance(data, ImageData):
        raise UserError("plan needs a model and data of this application: give --model and --data")
    batch = data.global_batch_size
    measured = list(records)
    if not measured:
        for size in sorted({batch, max(batch // 4, 1), max(batch // 16, 1)}, reverse=True):
            say(f"measuring steps on one device with batches of {size}")
            measured.append(run_steps([*arguments, "--data.batch_size", str(size)]))
    say("timing the gradients of a backward pass")
    device = torch.device(resolved.accelerator)
    is_mixed = str(resolved.trainer.precision).endswith("-mixed")
    assert measured[0].global_batch_size
    size = max(measured[0].global_batch_size // measured[0].replicas, 1)
    images = torch.randn(size, *data.image_shape, device=device)
    backward, gradients = profile_gradients(model.to(device), images, is_mixed)
    return fit_step(measured, backward, make_buckets(gradients)), batch


def run_steps(arguments: list[str]) -> Record:
    """Train for 30 steps on one device, and return the record.

    Raises:
        UserError: When the run fails, or its steps were not timed.
    """
    flags = [*arguments[1:], *ONE_DEVICE]
    # no warm-up, because `fit` rejects one that is as long as the run
    if "warmup" in resolve(arguments).model.init_args:
        flags += ["--model.warmup", "0"]
    record = run_fit(flags, TIMEOUT)
    if record.time_limit is not None:
        raise UserError(f"30 steps on one device took more than {TIMEOUT:g} s: use a smaller model")
    if record.status != "completed":
        raise UserError(str(record.error))
    if record.time_per_step is None:
        raise UserError("the steps could not be timed: leave --trainer.profiler out")
    return record


def read_records(paths: list[str]) -> list[Record]:
    """Read the records of the runs of `--run`.

    Raises:
        UserError: When a record is missing or lacks a field, a run was under dp, or the runs differ
            in more than the batch size.
    """
    records = []
    for path in paths:
        try:
            record = Record.load(Path(path.removesuffix("run.json"), "run.json"))
        except ValueError as error:
            raise UserError(f"--run {path}: {error}: give a run's directory") from error
        records.append(record)
        for name in ("time_per_step", "global_batch_size", "config", "hardware", "peak_memory"):
            if not getattr(record, name):
                raise UserError(
                    f"--run {path}: its record has no {name}: give a run of fit of 6 or more steps"
                )
        if record.world_size < record.replicas:
            raise UserError(
                f"--run {path} was under dp, so its step is not one device's: give another run"
            )
        for name in ("model", "precision", "threads"):
            if getattr(record, name) != getattr(records[0], name):
                raise UserError(f"the runs of --run differ in {name}: vary only the batch size")
    return records


def profile_gradients(
    model: ImageClassifier, images: Tensor, is_mixed: bool
) -> tuple[float, list[tuple[int, float]]]:
    """Measure the backward pass's share of the time, and when each gradient is ready.

    Args:
        model: The model.
        images: Batch of images, on the model's device.
        is_mixed: Whether the forward pass uses bfloat16.

    Returns:
        The backward pass's share of the time of both passes, 0…1. Then the gradients, the first
        ready one first: each one's bytes, and the time at which it is ready, as a share of the
        backward pass, 0…1.
    """
    device = images.device
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    wanted = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
    ready = dict.fromkeys(wanted, 0.0)  # seconds since the start of the backward pass, summed up

    def note(parameter: Parameter) -> None:
        ready[parameter] += time_when_done(device) - turned

    forward = backward = 0.0
    for repetition in range(12):
        if repetition == 2:  # the first two warm up
            forward = backward = 0.0
            for parameter in wanted:
                parameter.register_post_accumulate_grad_hook(note)
        began = time_when_done(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
            loss = model.recipe.criterion(model.network(images), labels).mean()
        turned = time_when_done(device)
        loss.backward()
        forward += turned - began
        backward += time_when_done(device) - turned
    gradients = []
    for parameter in sorted(wanted, key=ready.__getitem__):
        size = parameter.numel() * parameter.element_size()
        gradients.append((size, ready[parameter] / backward))
    return backward / (forward + backward), gradients
