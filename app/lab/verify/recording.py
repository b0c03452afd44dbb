"""Callback that records every step of a training on each rank."""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mode
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torchmetrics import Metric

from app.data.batches import GlobalBatches, tensors
from app.data.exact_loader import ExactLoader
from app.data.shares import Shards
from app.launch.signals import stop_training
from app.system.patches import expects

# folder in the run's directory; holds a rank_N.pt of each rank
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
        if not self.bits:
            return
        for name, module in pl_module.named_modules():
            path = f"{type(pl_module).__name__}.{name}".rstrip(".")
            module.register_forward_hook(functools.partial(self._record_output, path))

    def _record_output(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        """Record digests of an output's rows, which do not depend on the split of a batch."""
        if self._step is None or not torch.is_grad_enabled():
            return
        digests = self._step["bits"].setdefault(f"output of {path}", [])
        for value in tensors(output):
            digests += map(digest, torch.atleast_1d(value))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record facts that may explain differences, and limit the length of an epoch."""
        self.record |= facts(trainer, pl_module)
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
        if self._step is None:
            self._step = {
                "epoch": trainer.current_epoch,
                "samples": [],
                "labels": [],
                "counts": [],
                "losses": [],
                "gradients": {},
                "bits": {},
            }
        loader = trainer.train_dataloader
        samples, labels = contents(loader, batch, batch_idx)
        count = len(samples)
        if isinstance(loader, ExactLoader):  # also for batches that hide their samples
            count = loader.batch_sampler.share_size(batch_idx)
        self._step["counts"].append(count)
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
        # the last gradient is the first that backward computes
        for name, parameter in reversed(list(pl_module.named_parameters())):
            if parameter.grad is not None:
                step["gradients"][name] = norm(parameter.grad)
                if self.bits and trainer.is_global_zero:
                    step["bits"][f"gradient of {name}"] = [digest(parameter.grad)]

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
        state = {}
        for name, value in pl_module.state_dict().items():
            if isinstance(value, Tensor):
                state[name] = value.detach().cpu()
        self.record["digests"] = {name: digest(value) for name, value in state.items()}
        if trainer.is_global_zero:
            self.record["weights"] = state
        self.record["parameters"] = [
            name for name, parameter in pl_module.named_parameters() if parameter.requires_grad
        ]
        schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        optimizers = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        self.record["optimizers"] = numbers({"optimizers": optimizers, "schedulers": schedulers})
        self.record["attributes"] = attributes(trainer, pl_module)
        folder = Path(str(trainer.log_dir), FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.record, folder / f"rank_{trainer.global_rank:04}.pt")


def digest(value: Tensor) -> str:
    """Return a short digest of the bytes of a tensor."""
    plain = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=8).hexdigest()


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
        return loader.samples(index).tolist(), []
    ids = []
    labels = []
    for single in singles(batch):
        sample = [leaf.squeeze(0) for leaf in tensors(single)]
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
    if isinstance(loader, ExactLoader) and not isinstance(batch, Shards):
        count = loader.batch_sampler.share_size(index)  # 0 for a stand-in
        return ids[:count], labels[:count]
    return ids, labels


def is_mask(leaf: Tensor) -> bool:
    """Return whether a sample's tensor is a mask: 1 for a token, 0 for padding."""
    if leaf.ndim != 1 or leaf.is_floating_point():
        return False
    values = leaf.tolist()
    return values[:1] == [1] and set(values) <= {0, 1}


def singles(batch: Any) -> list[Any]:
    """Cut a batch into batches of one sample.

    A batch holds stacked tensors, or lists with one item per sample, as in detection. Or it is
    itself a list of samples.
    """
    samples = []
    if isinstance(batch, Shards):
        for shard, count in zip(batch, batch.counts, strict=True):
            samples += singles(shard)[:count]
        return samples
    lengths = [leaf.ndim and len(leaf) for leaf in tensors(batch)]
    size = mode(list(filter(None, lengths)) or [0])
    kinds: Any = Tensor
    columns = batch
    if len(set(lengths)) > 1 and isinstance(batch, Mapping | list | tuple):
        if not isinstance(batch, Mapping):
            columns = dict(enumerate(batch))
        lists = [column for column in columns.values() if isinstance(column, list | tuple)]
        if lists and all(map(are_alike, lists)) and len(set(map(len, lists))) == 1:
            kinds = (Tensor, list, tuple)
            size = len(lists[0])
        elif isinstance(batch, list) and are_alike(batch) and not isinstance(batch[0], Tensor):
            return [[sample] for sample in batch]
    for row in range(size):

        def cut(part: Any, row: int = row) -> Any:
            has_rows = getattr(part, "ndim", 1) and len(part) == size
            return part[row : row + 1] if has_rows else part

        single = apply_to_collection(columns, kinds, cut)
        if columns is not batch:
            single = tuple(single.values())
        samples.append(single)
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
    if isinstance(state, int | float):
        return {path: float(state)}
    leaves: dict[str, float] = {}
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    if isinstance(state, Mapping):
        for name, value in state.items():
            leaves |= numbers(value, f"{path}.{name}".lstrip("."))
    return leaves


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
    schedulers = []
    for config in trainer.lr_scheduler_configs:
        lengths = numbers(config.scheduler.state_dict())
        lengths["estimated_stepping_batches"] = float(trainer.estimated_stepping_batches)
        name = type(config.scheduler).__name__
        schedulers.append({"class": name, "interval": config.interval, "lengths": lengths})
    loader: Any = trainer.train_dataloader
    is_exact = isinstance(loader, ExactLoader)
    loop = trainer.fit_loop.epoch_loop
    return {
        # of a user's exact loader
        "global_batch": loader.batch_sampler.batch_size if is_exact else 0,
        "loader_batch": loader.loader.batch_sampler.batch_size if is_exact else 0,
        # whether the step weighs the losses of unequal shares
        "weighs": is_exact and not getattr(loop, "reason", "another loop"),
        "accumulate": int(trainer.accumulate_grad_batches),
        "sampler": type(getattr(loader, "sampler", None)).__name__,
        "batches": trainer.num_training_batches,
        "schedulers": schedulers,
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
            if not name.startswith("_") and isinstance(value, int | float | Tensor):
                values[f"{path}.{name}".lstrip(".")] = value
    return numbers(values)
