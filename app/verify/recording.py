"""What a training does at every step, as a callback sees it on each rank."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from app.data.batches import GlobalBatches
from app.launch.signals import stop_training

FOLDER = "recording"  # in the directory of the run: rank_N.json of each rank, weights.pt of rank zero


class Recording(Callback):
    """Writes down samples, learning rates, losses, gradients and evaluations; ends training after some steps.

    Args:
        steps: Optimizer steps after which training ends.
        epoch_steps: Optimizer steps after which an epoch ends, so that a few steps see more than one of them.
    """

    def __init__(self, steps: int, epoch_steps: int) -> None:
        self.steps, self.epoch_steps = steps, epoch_steps
        self.record: dict[str, Any] = {"steps": [], "evaluation": {}, "metrics": {}}
        self._step: dict[str, Any] | None = None  # between two updates
        self._random = torch.empty(0)
        self._scale = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what a difference may come from, and cut the epochs."""
        self.record["facts"] = facts(trainer, pl_module)
        batches = self.epoch_steps * trainer.accumulate_grad_batches
        if trainer.fit_loop.max_batches > batches:
            trainer.fit_loop.max_batches = batches
            trainer.val_check_batch = min(trainer.val_check_batch or batches, batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the samples of a batch."""
        if self._step is None:
            self._step = {"step": trainer.global_step, "epoch": trainer.current_epoch, "loss": 0.0}
            self._step |= {"samples": [], "labels": [], "losses": []}
        samples, labels = contents(trainer.train_dataloader, batch, batch_idx)
        self._step["samples"].append(samples)
        self._step["labels"].append(labels)
        self._random = torch.get_rng_state()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note learning rates and gradients, as they have been reduced, before they are clipped."""
        assert self._step is not None
        groups = optimizer.param_groups
        self._step["rates"] = [float(group["lr"]) for group in groups]
        self._step["decays"] = [float(group.get("weight_decay") or 0.0) for group in groups]
        gradients = {name: each.grad for name, each in pl_module.named_parameters() if each.grad is not None}
        self._step["gradients"] = {name: each.detach().double().norm().item() for name, each in gradients.items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss; end training after the last step."""
        step = self._step
        assert step is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided it by the number of batches that are accumulated
        step["losses"].append(float("nan") if loss is None else float(loss) * trainer.accumulate_grad_batches)
        if not torch.equal(self._random, torch.get_rng_state()):
            self.record["draws"] = True
        if "rates" not in step and (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        step["loss"], self._step = sum(step["losses"]) / trainer.accumulate_grad_batches, None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 0.0
        step["skipped"], self._scale = scale < self._scale, scale
        self.record["steps"].append(step)
        if trainer.global_step >= self.steps:
            stop_training(trainer, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin another evaluation: the last one counts."""
        self.record["evaluation"] = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the samples of a batch."""
        loaders = trainer.val_dataloaders
        loader = loaders[dataloader_idx] if isinstance(loaders, list) else loaders
        self.record["evaluation"].setdefault(str(dataloader_idx), []).append(contents(loader, batch, batch_idx)[0])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it all, with what the training ends with. Collective."""
        self.record["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        state = {name: value.detach().cpu() for name, value in pl_module.state_dict().items()}
        self.record["digests"] = {name: digest(value) for name, value in state.items()}
        self.record["parameters"] = [name for name, _ in pl_module.named_parameters()]
        self.record["optimizers"] = [sizes(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers]
        self.record["schedulers"] = schedulers(trainer)
        self.record["attributes"] = attributes(trainer, pl_module)
        folder = Path(str(trainer.log_dir), FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        if trainer.is_global_zero:
            torch.save(state, folder / "weights.pt")
        (folder / f"rank_{trainer.global_rank}.json").write_text(json.dumps(self.record))


def digest(value: Tensor) -> str:
    """A short digest of the bytes of a tensor."""
    plain = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=8).hexdigest()


def contents(loader: Any, batch: Any, index: int) -> tuple[list[Any], list[str]]:
    """Which samples a batch holds: rows of our own loaders, else digests of each; and digests of what is integer."""
    if isinstance(loader, GlobalBatches):
        return loader.samples(index).tolist(), []
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    count = len(leaves[0]) if leaves else 0
    leaves = [leaf for leaf in leaves if len(leaf) == count]
    whole = [" ".join(digest(leaf[row : row + 1]) for leaf in leaves) for row in range(count)]
    integers = [leaf for leaf in leaves if not leaf.is_floating_point()]
    return whole, [" ".join(digest(leaf[row : row + 1]) for leaf in integers) for row in range(count) if integers]


def sizes(state: Any) -> Any:
    """The same structure with the norm in place of each tensor."""
    if isinstance(state, Tensor):
        return state.detach().double().norm().item()
    if isinstance(state, dict):
        return {str(key): sizes(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [sizes(value) for value in state]
    return state if isinstance(state, bool | int | float | str) else None


def schedulers(trainer: Trainer) -> list[dict[str, Any]]:
    """Class, interval and numbers of each learning-rate scheduler."""
    return [
        {
            "class": type(config.scheduler).__name__,
            "interval": config.interval,
            "state": {k: v for k, v in config.scheduler.state_dict().items() if isinstance(v, bool | int | float)},
        }
        for config in trainer.lr_scheduler_configs
    ]


def facts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What may explain a difference: loaders, schedule, and what in the network computes over a batch or by chance."""
    named = list(module.named_modules())
    loaders = trainer.val_dataloaders
    return {
        "world_size": trainer.world_size,
        "strategy": getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__),
        "precision": str(trainer.precision),
        "accumulate": trainer.accumulate_grad_batches,
        "clip": trainer.gradient_clip_val,
        "loader": loader_facts(trainer.train_dataloader),
        "evaluated": [loader_facts(each) for each in (loaders if isinstance(loaders, list) else [loaders])],
        "batches": trainer.num_training_batches,
        "estimated_steps": float(trainer.estimated_stepping_batches),
        "schedulers": schedulers(trainer),
        "batchnorm": [
            name for name, each in named if isinstance(each, _BatchNorm) and not isinstance(each, nn.SyncBatchNorm)
        ],
        "dropout": [name for name, each in named if isinstance(each, _DropoutNd) and each.p > 0],
        "hooked": [name for name, each in module.named_parameters() if each._backward_hooks],
    }


def loader_facts(loader: Any) -> dict[str, Any]:
    """What a loader is."""
    sampler = getattr(loader, "sampler", None)
    return {
        "ours": isinstance(loader, GlobalBatches),
        "sampler": type(sampler).__name__,
        "drop_last": bool(getattr(loader, "drop_last", False)),
    }


def attributes(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Numbers and tensors that the model's parts and the user's callbacks keep in attributes, by their names."""
    owners: list[tuple[str, Any]] = [
        (name, each) for name, each in module.named_modules() if not isinstance(each, Metric)
    ]
    callbacks: Iterable[Any] = trainer.callbacks  # type: ignore[attr-defined]
    theirs = [each for each in callbacks if type(each).__module__.partition(".")[0] not in ("app", "lightning")]
    owners += [(type(each).__name__, each) for each in theirs]
    found = {}
    for owner, each in owners:
        for name, value in vars(each).items():
            if not name.startswith("_") and isinstance(value, bool | int | float | Tensor):
                found[f"{owner}.{name}".lstrip(".")] = sizes(value)
    return found
