"""Callback that records every step of a training on each rank."""

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mode
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torchmetrics import Metric

from app.data.batches import GlobalBatches, tensors
from app.data.shares import Shards
from app.launch.signals import stop_training
from app.system.patches import expects

# folder in the run's directory; holds a rank_N.json of each rank, and rank zero's weights.pt
FOLDER = "recording"


class Recording(Callback):
    """Callback that records samples, rates, losses, gradients and evaluations, and limits training.

    Args:
        steps: Number of optimizer steps of training.
        epoch_steps: Number of optimizer steps per epoch, so that a short training has more than one
            epoch.
        bits: Whether to record digests of all modules' outputs and all gradients, too.
    """

    def __init__(self, steps: int, epoch_steps: int, bits: bool = False) -> None:
        self.steps = steps
        self.epoch_steps = epoch_steps
        self.bits = bits
        self.record: dict[str, Any] = {"steps": [], "evaluation": [], "metrics": {}}
        self._step: dict[str, Any] | None = None  # the current step
        self._random = torch.empty(0)
        self._before: dict[str, float] = {}  # metrics at the start of the last validation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the outputs of all modules, if `bits` is set."""
        if not self.bits or stage != "fit":
            return
        for name, module in pl_module.named_modules():
            path = f"{type(pl_module).__name__}.{name}".rstrip(".")
            module.register_forward_hook(functools.partial(self._record_output, path))

    def _record_output(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """Record digests of an output's rows, which do not depend on the split of a batch."""
        if self._step is None or not torch.is_grad_enabled():
            return
        digests = self._step["outputs"].setdefault(path, [])
        for value in tensors(output):
            digests += map(digest, torch.atleast_1d(value))

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
            self._step = {
                "epoch": trainer.current_epoch,
                "samples": [],
                "labels": [],
                "losses": [],
                "gradients": {},
                "outputs": {},
                "bits": {},
            }
        samples, labels = contents(trainer.train_dataloader, batch, batch_idx)
        self._step["samples"].append(samples)
        self._step["labels"] += labels
        self._random = torch.get_rng_state()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Record rates, and the gradients after their reduction over ranks and before clipping."""
        step = self._step
        if step is None:  # the module calls its optimizer outside a batch
            return
        rates = step.setdefault("rates", [])
        for group in optimizer.param_groups:
            rates.append(float(group.get("lr") or 0.0))
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                step["gradients"][name] = norm(parameter.grad)
                if self.bits:
                    step["bits"][name] = digest(parameter.grad)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and stop training after the last step."""
        step = self._step
        if step is None:  # Lightning skips a batch for which the collate function returns None
            return
        accumulated = trainer.accumulate_grad_batches
        # undo Lightning's division by the number of accumulated batches
        step["losses"].append(loss_of(outputs) * accumulated)
        if not torch.equal(self._random, torch.get_rng_state()):
            self.record["draws"] = True
        is_last = trainer.is_last_batch or (batch_idx + 1) % accumulated == 0
        if "rates" not in step and not is_last:
            return
        step["loss"] = sum(step["losses"]) / accumulated
        self.record["steps"].append(step)
        self._step = None
        # global_step counts the steps of all optimizers
        if trainer.global_step >= self.steps * max(len(trainer.optimizers), 1):
            stop_training(trainer, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the previous evaluation, because only the last one is compared."""
        self.record["evaluation"] = []
        self._before = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics that were logged in a validation."""
        if trainer.sanity_checking:
            return
        metrics = self.record["metrics"]
        for name, value in trainer.callback_metrics.items():
            if name in metrics or self._before.get(name) != float(value):
                metrics[name] = float(value)

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
        loader = trainer.val_dataloaders
        if isinstance(loader, list):
            loader = loader[dataloader_idx]
        self.record["evaluation"] += contents(loader, batch, batch_idx)[0]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write recording and final weights. Collective, because `trainer.log_dir` broadcasts."""
        state: dict[str, Tensor] = {}
        digests = self.record["digests"] = {}
        for name, value in pl_module.state_dict().items():
            if isinstance(value, Tensor):
                state[name] = value.detach().cpu()
                digests[name] = digest(value)
        self.record["parameters"] = [
            name for name, parameter in pl_module.named_parameters() if parameter.requires_grad
        ]
        states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        self.record["optimizers"] = numbers(
            {"optimizers": states, "schedulers": schedulers(trainer)}
        )
        self.record["attributes"] = attributes(trainer, pl_module)
        folder = Path(str(trainer.log_dir), FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        if trainer.is_global_zero:
            torch.save(state, folder / "weights.pt")
        file = folder / f"rank_{trainer.global_rank:04}.json"
        file.write_text(json.dumps(self.record))


def digest(value: Tensor) -> str:
    """Return a short digest of the bytes of a tensor."""
    plain = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=8).hexdigest()


def loss_of(outputs: Any) -> float:
    """Return the loss of a training step's outputs; NaN for a skipped step."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    return math.nan if outputs is None else float(outputs)


def contents(loader: Any, batch: Any, index: int) -> tuple[list[Any], list[str]]:
    """Return ids of a batch's samples, and digests of their integer tensors.

    With this application's loaders, the id is the sample's row in the data set, and digests are
    omitted. With other loaders, the id is a digest of the sample's tensors.
    """
    if isinstance(loader, GlobalBatches):
        return loader.order.samples(index).tolist(), []
    ids = []
    labels = []
    for sample in samples_of(batch):
        masks = list(filter(is_mask, sample))
        digests = []
        integers = []
        for leaf in sample:
            for mask in masks:
                if leaf.shape == mask.shape:
                    leaf = leaf * mask
            digests.append(digest(unpadded(leaf)))
            if not leaf.is_floating_point():
                integers.append(digests[-1])
        ids.append(" ".join(digests))
        if integers:
            labels.append(" ".join(integers))
    return ids, labels


def samples_of(batch: Any) -> list[Sequence[Tensor]]:
    """Return the tensors of each sample of a batch."""
    samples: list[Sequence[Tensor]] = []
    if isinstance(batch, Shards):
        for shard, count in zip(batch, batch.counts, strict=True):
            if count:
                samples += samples_of(shard)
        return samples
    size = batch_size(batch)
    leaves = [leaf for leaf in tensors(batch) if leaf.ndim and len(leaf) == size]
    return list(map(tensors, unstacked(batch))) or list(zip(*leaves, strict=True))


def is_mask(leaf: Tensor) -> bool:
    """Return whether a sample's tensor is a mask: 1 for a token, 0 for padding."""
    if leaf.ndim != 1 or leaf.is_floating_point():
        return False
    values = leaf.tolist()
    return values[:1] == [1] and set(values) <= {0, 1}


def batch_size(batch: Any) -> int:
    """Return the number of samples of a batch of stacked tensors."""
    return mode([len(leaf) for leaf in tensors(batch) if leaf.ndim] or [0])


def singles(batch: Any) -> list[Any]:
    """Cut a batch into batches of one sample."""
    samples = unstacked(batch)
    if samples:
        return samples
    for row in range(batch_size(batch)):

        def cut(leaf: Tensor, row: int = row) -> Tensor:
            return leaf[row : row + 1] if leaf.ndim else leaf

        samples.append(apply_to_collection(batch, Tensor, cut))
    return samples


def unstacked(batch: Any) -> list[Any]:
    """Cut an unstacked batch into batches of one sample.

    An unstacked batch holds lists with one item per sample, as in detection, or is itself a list of
    samples. Return [] for other batches, such as stacked tensors.
    """
    sizes = {leaf.ndim and len(leaf) for leaf in tensors(batch)}
    is_mapping = isinstance(batch, Mapping)
    if len(sizes) < 2 or not (is_mapping or isinstance(batch, list | tuple)):
        return []
    columns = dict(batch if is_mapping else enumerate(batch))
    lists = {}
    sized = {}
    for key, column in columns.items():
        if isinstance(column, list | tuple):
            lists[key] = column
        elif getattr(column, "ndim", 0):
            sized[key] = column
    sized |= lists
    lengths = set(map(len, sized.values()))
    samples: list[Any] = []
    if lists and len(lengths) == 1 and all(map(are_alike, lists.values())):
        for row in range(lengths.pop()):
            single = dict(columns)
            for key, column in sized.items():
                single[key] = column[row : row + 1]
            samples.append(single if is_mapping else tuple(single.values()))
    elif isinstance(batch, list) and are_alike(batch) and not isinstance(batch[0], Tensor):
        for sample in batch:
            samples.append([sample])
    return samples


def are_alike(items: Sequence[Any]) -> bool:
    """Return whether all items have the same type, and the same dimensions or keys."""
    return len({(type(item), getattr(item, "ndim", 0)) for item in items}) == 1


def unpadded(sample: Tensor) -> Tensor:
    """Remove an integer sequence's trailing zeros and -100, then repetitions of its last value."""
    if sample.ndim != 1 or sample.is_floating_point():
        return sample
    values = sample.tolist()
    while len(values) > 1 and values[-1] in (0, -100, values[-2]):
        values.pop()
    return torch.tensor(values)


def norm(value: Tensor) -> float:
    """Return the norm of a tensor."""
    return value.detach().cpu().double().norm().item()


def numbers(state: Any, path: str = "") -> dict[str, float]:
    """Return the numbers of a nested structure by path, and the norms of its tensors."""
    if isinstance(state, Tensor):
        return {path: norm(state)}
    if isinstance(state, bool | int | float):
        return {path: state}
    leaves: dict[str, float] = {}
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    if isinstance(state, Mapping):
        for name, value in state.items():
            leaves |= numbers(value, f"{path}.{name}".lstrip("."))
    return leaves


def schedulers(trainer: Trainer) -> list[dict[str, Any]]:
    """Return class, interval and numeric state of each learning-rate scheduler."""
    rows = []
    for config in trainer.lr_scheduler_configs:
        rows.append(
            {
                "class": type(config.scheduler).__name__,
                "interval": config.interval,
                "state": numbers(config.scheduler.state_dict()),
            }
        )
    return rows


@expects("torch:Tensor._backward_hooks", "torch.nn.modules.dropout:_DropoutNd")
def facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return facts that may explain differences: loader, schedules, BatchNorm, dropout, hooks."""
    batchnorm = []
    dropout = []
    for name, layer in module.named_modules():
        # SyncBatchNorm, which is none of these, normalises whole batches
        is_batchnorm = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        if is_batchnorm and layer.training:
            batchnorm.append(name)
        if isinstance(layer, _DropoutNd) and layer.p > 0:
            dropout.append(name)
    rows = schedulers(trainer)
    for row in rows:
        row["state"]["estimated_stepping_batches"] = float(trainer.estimated_stepping_batches)
    return {
        "accumulate": trainer.accumulate_grad_batches,
        "sampler": type(getattr(trainer.train_dataloader, "sampler", None)).__name__,
        "batches": trainer.num_training_batches,
        "schedulers": rows,
        "batchnorm": batchnorm,
        "dropout": dropout,
        "hooked": [name for name, p in module.named_parameters() if p._backward_hooks],
    }


def attributes(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """Return numeric public attributes of all modules and the user's callbacks, by name."""
    owners = list(module.named_modules())
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if type(callback).__module__.partition(".")[0] not in ("app", "lightning"):
            owners.append((type(callback).__name__, callback))
    values = {}
    for path, owner in owners:
        if isinstance(owner, Metric):
            continue
        for name, value in vars(owner).items():
            if not name.startswith("_") and isinstance(value, bool | int | float | Tensor):
                values[f"{path}.{name}".lstrip(".")] = value
    return numbers(values)
