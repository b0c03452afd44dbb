"""Options of a run, and rank zero's decisions before the start: checkpoint and directory."""

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace, dict_to_namespace
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.command.arguments import load_yaml, read_yaml
from app.command.checkpoints import find_checkpoint, is_newest, newest_checkpoint, read_earlier
from app.launch.cluster_environment import may_resume
from app.modules.networks import title
from app.monitor.loggers import claim_version
from app.record import Record
from app.system.files import remove_parts


@dataclass
class Run:
    """Options of a run: folder, tracking, threads and training loop.

    Args:
        name: Name of the experiment; by default network and data, such as LeNet-CIFAR10.
        root: Directory of all runs; a run is saved in `root/name/version_N`.
        test: Test the best checkpoint at the end of fit.
        wandb: Mode of Weights & Biases: `online`, `offline` (sends nothing) or `off`; by default
            WANDB_MODE, else `offline`. If flag and variable differ, the more private mode is used.
        track_images: Upload the most confidently wrong test images.
        project: Project in Weights & Biases.
        group: Group of the run in Weights & Biases.
        tags: Tags of the run in Weights & Biases.
        top_k: Number of classes per image in predictions.csv, most likely first.
        warmup_epochs: Epochs excluded from the throughput in run.json.
        on_nonfinite: Reaction to an infinite or NaN loss: `stop` before the next checkpoint, `warn`
            and continue, or `skip` updates with non-finite gradients, at the cost of a device read
            per step.
        threads: CPU threads of each process; `auto`: OMP_NUM_THREADS, else an equal share of the
            cores.
        virtual_devices: Train as if on this many devices, with bitwise equal results on 1 to this
            many processes. Each global batch is cut into this many shards, whose gradients are
            added in a fixed order.
        balance: Give slow processes fewer shards, adjusted after each epoch.
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
    on_nonfinite: Literal["stop", "warn", "skip"] = "stop"
    threads: PositiveInt | Literal["auto"] = "auto"
    virtual_devices: PositiveInt | None = None
    balance: bool = False
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
    return f"{model}-{config.data.class_path.rpartition('.')[2]}"


def is_recorded(trainer: Namespace) -> bool:
    """Return whether a run writes files; `fast_dev_run` and `barebones` do not."""
    return not (trainer.fast_dev_run or trainer.barebones)


_HELD: list[int] = []  # descriptors of locked folders
TRAINING = (  # prefixes of flags that define a training
    "seed_everything",
    "model.",
    "data.",
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip",
    "trainer.limit_train_batches",
    "trainer.overfit_batches",
    "trainer.sync_batchnorm",
    "run.virtual_devices",
    "run.loader",
    "run.global_batch",
)
# exceptions to TRAINING, by suffix: paths and settings of execution, which a resumed run may change
EXECUTION = (
    ".root",
    ".csv",
    ".path",
    ".predict_dir",
    ".cache",
    ".num_workers",
    ".placement",
    "model.channels_last",
    "model.compile",
    "model.matmul_precision",
)


def decide(
    stage: str,
    config: Namespace,
    dump: Callable[[], str],
    checkpoint: str | None,
    command: str,
    launchers: list[str],
) -> dict[str, Any]:
    """Decide the run's checkpoint and folder, on rank zero.

    Args:
        stage: `fit`, `validate`, `test` or `predict`.
        config: Resolved configuration.
        dump: Function that returns the configuration as YAML.
        checkpoint: Value of `--ckpt_path`, or None.
        command: The command line.
        launchers: Ids of the launchers of the run's processes.

    Returns:
        `checkpoint` and `folder`: paths, or None. `may_be_finished`: see `check_checkpoint`.
        `earlier`: record of the run that this one continues, or None. `launchers`: as above.

    Raises:
        UserError: When the checkpoint is missing, or the run's folder cannot be created.
    """
    root = config.run.root
    name = config.run.name or default_name(config)
    for pattern in ("version_*", "version_*/checkpoints"):
        for path in Path(root, name).glob(pattern):
            remove_parts(path)
    restarts = stage == "fit" and may_resume()  # a launcher may have restarted this run
    newest = None
    if restarts:
        newest = newest_checkpoint(root, name, (command, launchers))
    if newest is None and checkpoint == "auto":
        newest = newest_checkpoint(root, name, None)
    # a run killed after training must still run its test
    may_be_finished = checkpoint == "auto" or newest is not None
    may_be_finished = may_be_finished or (restarts and checkpoint is None)
    if newest is not None:
        rank_zero_info(f"resuming from {newest}")
    elif checkpoint not in (None, "auto"):
        newest = requested_checkpoint(config, checkpoint, resumes=stage == "fit")
    folder = earlier = None
    if is_recorded(config.trainer):
        folder, earlier = _folder(stage, config.run, Path(root, name), newest, dump)
        if folder.is_relative_to(root):  # the root may differ between nodes
            folder = folder.relative_to(root)
    return {
        "checkpoint": newest,
        "may_be_finished": may_be_finished,
        "folder": folder,
        "earlier": earlier,
        "launchers": launchers,
    }


def requested_checkpoint(config: Namespace, checkpoint: str, resumes: bool = False) -> str:
    """Return the path of the checkpoint that `--ckpt_path` names.

    Raises:
        UserError: When the checkpoint is missing or damaged.
    """
    configs = [str(file) for file in config.config or []]
    name = config.run.name or default_name(config)
    return find_checkpoint(checkpoint, configs, config.run.root, name, resumes)


def _folder(
    stage: str, run: Namespace, new: Path, checkpoint: str | None, dump: Callable[[], str]
) -> tuple[Path, Record | None]:
    """Return this run's folder, and the earlier training's record, or None in a new folder.

    `fit` continues in an ended run's folder if it resumes from that run's newest checkpoint with
    the same settings. Otherwise, `fit` creates a new folder. Other commands create a folder inside
    the folder of the checkpoint's run.

    Every command creates a new folder if the checkpoint belongs to no run. It also does so if
    `--run.name` or `--run.root` is given, and the checkpoint's run lies elsewhere.
    """
    used = Path(checkpoint or "").parent.parent
    is_chosen = run.name is not None or run.root != Run.root
    is_elsewhere = is_chosen and used.parent.resolve() != new.resolve()
    if checkpoint is None or is_elsewhere or not (used / "run.json").exists():
        return _held(claim_version(new)), None
    if stage != "fit":
        return _held(claim_version(used, stage)), None
    record = read_earlier(used / "run.json")
    before = {}
    if (used / "config.yaml").is_file():
        before = _settings(read_yaml(str(used / "config.yaml")))
    reason = None
    if not is_newest(Path(checkpoint)):
        reason = "it has newer checkpoints"
    for name, value in _settings(load_yaml(dump())).items():
        if before.get(name, value) != value:
            reason = f"--{name} differs"
    if reason is None:
        try:
            return _held(used), record
        except BlockingIOError:
            reason = "it is still running"
    rank_zero_info(f"not continuing {used}: {reason}")
    return _held(claim_version(new)), None


def _held(folder: Path) -> Path:
    """Lock a folder, so that no other process continues in it.

    Raises:
        BlockingIOError: When another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        pass
    _HELD.append(descriptor)
    return folder


def release_folders() -> None:
    """Unlock the folders of this process's runs."""
    while _HELD:
        os.close(_HELD.pop())


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config's flags that define the training."""
    settings = {}
    for name, value in vars(dict_to_namespace(config).as_flat()).items():
        flag = name.replace(".init_args", "")
        if flag.startswith(TRAINING) and not flag.endswith(EXECUTION):
            settings[flag] = value
    return settings
