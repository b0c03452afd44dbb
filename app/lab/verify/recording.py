"""Callback that records every step of a training on each rank."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mode
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker
from torchmetrics import Metric

from app.data.batches import GlobalBatches, tensors
from app.data.shares import Shards
from app.launch.signals import stop_training
from app.system.patches import expects

# folder in the run's directory; holds a rank_N.json of each rank, and rank zero's weights.pt
FOLDER = "recording"


@expects("torch.utils._python_dispatch:TorchDispatchMode")
class Operations(TorchDispatchMode):
    """Dispatch mode that records each operation's module and name, and digests of its output.

    Args:
        samples: Number of samples of the batch. An output with this many rows gets one digest per
            row.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.rows = list[tuple[str, str, list[str]]]()
        self.tracker = ModuleTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        module = max(self.tracker.parents, key=len)
        name = func.name().partition("::")[2].partition(".")[0]
        for value in () if func.is_view else tensors(output):
            split = value.ndim and len(value) == self.samples
            self.rows.append((module, name, [digest(row) for row in (value if split else [value])]))
        return output


class Recording(Callback):
    """Callback that records samples, learning rates, losses, gradients and evaluations, and limits training.

    Args:
        steps: Number of optimizer steps of training.
        epoch_steps: Number of optimizer steps per epoch, so that a short training has more than one
            epoch.
        bits: Whether to record digests of all operations' outputs and all gradients, too.
    """

    def __init__(self, steps: int, epoch_steps: int, bits: bool = False) -> None:
        self.steps = steps
        self.epoch_steps = epoch_steps
        self.bits = bits
        self.record: dict[str, Any] = {"steps": [], "evaluation": {}, "metrics": {}}
        self._step: dict[str, Any] | None = None  # the current step
        self._random = torch.empty(0)
        self._before: dict[str, float] = {}  # metrics at the start of the last validation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap `training_step` to record its operations, if `bits` is set."""
        if self.bits and stage == "fit":
            pl_module.training_step = self._watched(pl_module)  # type: ignore[method-assign]

    def _watched(self, module: LightningModule) -> Callable[..., Any]:
        training_step = module.training_step

        @functools.wraps(training_step)
        def watched(batch: Any, *args: Any) -> Any:
            samples = next((len(leaf) for leaf in tensors(batch) if leaf.ndim), 0)
            with (operations := Operations(samples)), operations.tracker:
                output = training_step(batch, *args)
            assert self._step is not None
            if samples:  # a rank without samples trains on a stand-in batch, which is not recorded
                self._step.setdefault("operations", []).append(operations.rows)
            return output

        return watched

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record facts that may explain differences, and limit the length of an epoch."""
        self.record["facts"] = facts(trainer, pl_module)
        batches = self.epoch_steps * trainer.accumulate_grad_batches
        if trainer.fit_loop.max_batches > batches:
            trainer.fit_loop.max_batches = batches
            if trainer.val_check_batch == float("inf"):
                # for a loader without a length, Lightning validates after every
                # `limit_train_batches` batches
                trainer.limit_train_batches = batches
            elif trainer.val_check_batch is not None:
                trainer.val_check_batch = min(trainer.val_check_batch, batches)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the samples of a batch."""
        if self._step is None or self._step["epoch"] != trainer.current_epoch:
            self._step = {"epoch": trainer.current_epoch, "samples": [], "labels": [], "losses": []}
        samples, labels = contents(trainer.train_dataloader, batch, batch_idx)
        self._step["samples"].append(samples)
        self._step["labels"].append(labels)
        self._random = torch.get_rng_state()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the learning rates, and the gradients after their reduction over ranks and before clipping."""
        if self._step is None:  # the module calls its optimizer outside a batch
            return
        for group in optimizer.param_groups:
            self._step.setdefault("rates", []).append(float(group.get("lr") or 0.0))
        gradients = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self._step["gradients"] = {name: norm(gradient) for name, gradient in gradients.items()}
        if self.bits:
            self._step["bits"] = {name: digest(gradient) for name, gradient in gradients.items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and stop training after the last step."""
        step = self._step
        if step is None:  # Lightning skips a batch for which the collate function returns None
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # undo Lightning's division by the number of accumulated batches
        step["losses"].append(
            float("nan") if loss is None else float(loss) * trainer.accumulate_grad_batches
        )
        if not torch.equal(self._random, torch.get_rng_state()):
            self.record["draws"] = True
        if (
            "rates" not in step
            and (batch_idx + 1) % trainer.accumulate_grad_batches
            and not trainer.is_last_batch
        ):
            return
        step["loss"], self._step = sum(step["losses"]) / trainer.accumulate_grad_batches, None
        self.record["steps"].append(step)
        # global_step counts the steps of all optimizers
        if trainer.global_step >= self.steps * max(len(trainer.optimizers), 1):
            stop_training(trainer, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the previous evaluation, because only the last one is compared."""
        self.record["evaluation"] = {}
        self._before = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the logged metrics."""
        now = {name: float(value) for name, value in trainer.callback_metrics.items()}
        names = {
            name for name, value in now.items() if self._before.get(name) != value
        } | self.record["metrics"].keys()
        if not trainer.sanity_checking:
            self.record["metrics"] = {name: now[name] for name in names if name in now}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Record the samples of a batch."""
        if trainer.sanity_checking:
            return
        loader = (
            loaders[dataloader_idx]
            if isinstance(loaders := trainer.val_dataloaders, list)
            else loaders
        )
        self.record["evaluation"].setdefault(str(dataloader_idx), []).append(
            contents(loader, batch, batch_idx)[0]
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the recording and the final weights. Collective, because `trainer.log_dir` broadcasts."""
        state = {
            k: v.detach().cpu() for k, v in pl_module.state_dict().items() if isinstance(v, Tensor)
        }
        self.record["digests"] = {name: digest(value) for name, value in state.items()}
        self.record["parameters"] = [
            name for name, p in pl_module.named_parameters() if p.requires_grad
        ]
        self.record["optimizers"] = [
            norms(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers
        ]
        self.record["schedulers"] = schedulers(trainer)
        self.record["attributes"] = attributes(trainer, pl_module)
        folder = Path(str(trainer.log_dir), FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        if trainer.is_global_zero:
            torch.save(state, folder / "weights.pt")
        (folder / f"rank_{trainer.global_rank:04}.json").write_text(
            json.dumps(self.record, default=lambda other: None)
        )


def digest(value: Tensor) -> str:
    """Return a short digest of the bytes of a tensor."""
    plain = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=8).hexdigest()


def contents(loader: Any, batch: Any, index: int) -> tuple[list[Any], list[str]]:
    """Return ids of a batch's samples, and digests of their integer tensors.

    With this application's loaders, the id is the sample's row in the data set, and digests are
    omitted. With other loaders, the id is a digest of the sample's tensors.
    """
    if isinstance(loader, GlobalBatches):
        return loader.samples(index).tolist(), []
    if isinstance(batch, Shards):
        pairs = [
            contents(None, shard, index)
            for shard, count in zip(batch, batch.counts, strict=True)
            if count
        ]
        return [sample for pair in pairs for sample in pair[0]], [
            label for pair in pairs for label in pair[1]
        ]
    samples = [tensors(sample) for sample in unstacked(batch)]
    if not samples:
        sized = [leaf for leaf in tensors(batch) if leaf.ndim]
        leaves = [leaf for leaf in sized if len(leaf) == mode(map(len, sized))]
        integral = [leaf for leaf in leaves if leaf.ndim == 2 and not leaf.is_floating_point()]
        # masks: 1 for a token, 0 for padding
        for mask in [
            leaf for leaf in integral if leaf[:, :1].all() and ((leaf == 0) | (leaf == 1)).all()
        ]:
            leaves = [leaf * mask if leaf.shape == mask.shape else leaf for leaf in leaves]
        samples = [list(row) for row in zip(*leaves, strict=True)]
    whole = [" ".join(digest(unpadded(leaf)) for leaf in sample) for sample in samples]
    labels = [
        " ".join(digest(unpadded(leaf)) for leaf in sample if not leaf.is_floating_point())
        for sample in samples
    ]
    return whole, labels if any(labels) else []


def singles(batch: Any) -> list[Any]:
    """Cut a batch into batches of one sample."""
    size = mode([len(leaf) for leaf in tensors(batch) if leaf.ndim] or [0])
    return unstacked(batch) or [
        apply_to_collection(
            batch, Tensor, lambda leaf, row=row: leaf[row : row + 1] if leaf.ndim else leaf
        )
        for row in range(size)
    ]


def unstacked(batch: Any) -> list[Any]:
    """Cut an unstacked batch into batches of one sample.

    An unstacked batch holds lists with one item per sample, as in detection, or is itself a list of
    samples. Return [] for other batches, such as stacked tensors.
    """
    if len({leaf.ndim and len(leaf) for leaf in tensors(batch)}) < 2 or not isinstance(
        batch, Mapping | list | tuple
    ):
        return []
    columns = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    sized = {
        k: v for k, v in columns.items() if isinstance(v, list | tuple) or getattr(v, "ndim", False)
    }
    lists = [column for column in sized.values() if isinstance(column, list | tuple)]
    alike = all(
        len({(type(item), getattr(item, "ndim", 0)) for item in column}) == 1 for column in lists
    )
    if (
        lists and alike and len({*map(len, sized.values())}) == 1
    ):  # each list has one item per sample
        cut = [
            columns | {key: column[row : row + 1] for key, column in sized.items()}
            for row in range(len(lists[0]))
        ]
        return cut if isinstance(batch, Mapping) else [tuple(single.values()) for single in cut]
    # otherwise, the batch may be a list of samples
    kinds = {
        tuple(value) if isinstance(value, Mapping) else type(value) for value in columns.values()
    }
    return (
        [[sample] for sample in batch]
        if isinstance(batch, list) and len(kinds) == 1 and Tensor not in kinds
        else []
    )


def unpadded(sample: Tensor) -> Tensor:
    """Remove an integer sequence's trailing zeros and -100. Then remove repetitions of the last remaining value."""
    if sample.ndim != 1 or sample.is_floating_point() or not len(sample):
        return sample
    kept = sample[: int(((sample != 0) & (sample != -100)).nonzero()[-1:].sum()) + 1]
    return kept[: int((kept != kept[-1]).nonzero()[-1:].sum()) + 2]


def norm(value: Tensor) -> float:
    """Return the norm of a tensor."""
    return value.detach().cpu().double().norm().item()


def norms(state: Any) -> Any:
    """Replace each tensor of a nested structure by its norm."""
    return apply_to_collection(state, Tensor, norm)


def schedulers(trainer: Trainer) -> list[dict[str, Any]]:
    """Return class, interval and numeric state of each learning-rate scheduler."""
    rows = []
    for config in trainer.lr_scheduler_configs:
        state = {
            k: v
            for k, v in config.scheduler.state_dict().items()
            if isinstance(v, bool | int | float)
        }
        rows.append(
            {"class": type(config.scheduler).__name__, "interval": config.interval, "state": state}
        )
    return rows


@expects(
    "torch:Tensor._backward_hooks",
    "torch.nn.modules.batchnorm:_BatchNorm",
    "torch.nn.modules.dropout:_DropoutNd",
)
def facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return facts that may explain differences: loader, schedules, and layers such as BatchNorm and dropout."""
    layers = [
        (name, layer)
        for name, layer in module.named_modules()
        if not isinstance(layer, nn.SyncBatchNorm)
    ]
    return {
        "strategy": getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__),
        "accumulate": trainer.accumulate_grad_batches,
        "sampler": type(getattr(trainer.train_dataloader, "sampler", None)).__name__,
        "batches": trainer.num_training_batches,
        "estimated_steps": float(trainer.estimated_stepping_batches),
        "schedulers": schedulers(trainer),
        "batchnorm": [
            name for name, layer in layers if isinstance(layer, _BatchNorm) and layer.training
        ],
        "dropout": [
            name for name, layer in layers if isinstance(layer, _DropoutNd) and layer.p > 0
        ],
        "hooked": [name for name, p in module.named_parameters() if p._backward_hooks],
    }


def attributes(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return numeric public attributes of all modules and of the user's callbacks, by name, with norms for tensors."""
    owners = [pair for pair in module.named_modules() if not isinstance(pair[1], Metric)]
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    chosen = [
        c for c in callbacks if type(c).__module__.partition(".")[0] not in ("app", "lightning")
    ]
    owners += [(type(c).__name__, c) for c in chosen]
    return {
        f"{path}.{name}".lstrip("."): norms(value)
        for path, owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("_") and isinstance(value, bool | int | float | Tensor)
    }
