"""Options of a run and of its Trainer."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from lightning import Trainer

from app.command.checkpoints import find_checkpoint
from app.modules.networks import title

# suffixes of paths and settings of execution, in which the nodes of a run and a resumed run may
# differ
PLACES = (".root", ".csv", ".path", ".predict_dir", ".cache", ".num_workers", ".placement")


@dataclass
class Run:
    """Options of a run: folder, tracking, threads and training loop.

    Args:
        name: Name of the experiment; by default network and data, such as LeNet-CIFAR10.
        root: Directory of all runs; a run is saved in `root/name/version_N`.
        test: Test the best checkpoint at the end of fit; without test images, validate it for the
            report.
        wandb: Mode of Weights & Biases: `online`, `offline` (sends nothing) or `off`; by default
            WANDB_MODE, else `offline`. If flag and variable differ, the more private mode is used.
        track_images: Upload the most confidently wrong test or validation images.
        project: Project in Weights & Biases.
        group: Group of the run in Weights & Biases.
        tags: Tags of the run in Weights & Biases.
        top_k: Number of classes per image in predictions.csv, most likely first.
        warmup_epochs: Epochs excluded from the throughput in run.json.
        on_divergence: Reaction to ranks whose learning rates or weights differ: `stop`, or `warn`
            once.
        on_nonfinite: Reaction to an infinite or NaN loss: `stop` before the next checkpoint, or
            `warn` and continue.
        threads: CPU threads of each process; `auto`: OMP_NUM_THREADS, else an equal share of the
            cores.
        find_lr: Search for the learning rate before training: 100 steps with a growing rate.
        virtual_devices: Train as if on this many devices, with bitwise equal results on 1 to this
            many processes. Each global batch is cut into this many shards, whose gradients are
            added in a fixed order.
        loader: Loading of your own DataLoader's samples: `exact` takes one seeded order on any
            number of processes, and evaluates each sample once; `lightning` leaves both to
            Lightning.
        global_batch: Samples of a training step with your own DataLoader, over all processes; by
            default its batch size, which counts per process, times the number of processes.
        loop: Training step: `straight` calls only overridden hooks and is faster; `lightning` is
            Lightning's own.
    """

    name: str | None = None
    root: str = "runs"
    test: bool = True
    wandb: Literal["online", "offline", "off"] | bool | None = None
    track_images: bool = False
    project: str = "data-parallel-lab"
    group: str | None = None
    tags: list[str] | None = None
    top_k: PositiveInt = 1
    warmup_epochs: NonNegativeInt = 0
    on_nonfinite: Literal["stop", "warn"] = "stop"
    on_divergence: Literal["stop", "warn"] = "stop"
    threads: PositiveInt | Literal["auto"] = "auto"
    find_lr: bool = False
    virtual_devices: PositiveInt | None = None
    loader: Literal["exact", "lightning"] = "exact"
    global_batch: PositiveInt | None = None
    loop: Literal["straight", "lightning"] = "straight"


class LimitedTrainer(Trainer):
    """Lightning's Trainer, with types for the limits that Lightning does not check."""

    def __init__(
        self,
        *,
        num_nodes: PositiveInt = 1,
        val_check_interval: PositiveInt | PositiveFloat | str | timedelta | None = None,
        check_val_every_n_epoch: PositiveInt | None = 1,
        accumulate_grad_batches: PositiveInt = 1,
        gradient_clip_val: NonNegativeFloat | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_nodes=num_nodes,
            val_check_interval=val_check_interval,
            check_val_every_n_epoch=check_val_every_n_epoch,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            **kwargs,
        )


def default_name(config: Namespace) -> str:
    """Return the default name of a run: its network and its data, such as LeNet-CIFAR10.

    Args:
        config: Resolved configuration.
    """
    module, _, model = config.model.class_path.rpartition(".")
    network = config.model.get("init_args.network")
    if module.startswith("app.modules") and network is not None:
        model = title(network)
    data = config.data.class_path.rpartition(".")[2]
    if data == "LightningDataModule":  # the model has loaders of its own
        return model
    return f"{model}-{data}"


def is_recorded(trainer: Namespace) -> bool:
    """Return whether a run writes files; `fast_dev_run` and `barebones` do not."""
    return not (trainer.fast_dev_run or trainer.barebones)


def requested_checkpoint(config: Namespace, checkpoint: str, resumes: bool = False) -> str:
    """Return the path of the checkpoint that `--ckpt_path` names.

    Raises:
        UserError: When the checkpoint is missing or damaged.
    """
    configs = [str(file) for file in config.config or []]
    name = config.run.name or default_name(config)
    return find_checkpoint(checkpoint, configs, config.run.root, name, resumes)
