"""Recipe of a training: loss, optimizer with its parameter groups, learning-rate schedule, frozen blocks, averaging."""

import inspect
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from jsonargparse.typing import ClosedUnitInterval, OpenUnitInterval, PositiveFloat, PositiveInt
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from app.errors import UserError
from app.modules.networks import head_of
from app.system.patches import expects

Loss = Literal["cross_entropy", "smooth_l1"]
Schedule = Literal["constant", "cosine", "linear", "onecycle", "step"]


def name_defaults(cls: type) -> type:
    """Return the class, with its default lambdas as attributes, so that `ddp_spawn` can pickle the lambdas.

    A default optimizer is a lambda, because jsonargparse reads the settings of a default only from
    a lambda.
    """
    for name, parameter in inspect.signature(cls).parameters.items():
        if getattr(parameter.default, "__name__", "") == "<lambda>" and "__init__" in vars(cls):
            setattr(cls, f"default_{name}", staticmethod(parameter.default))
            parameter.default.__qualname__ = f"{cls.__qualname__}.default_{name}"
    return cls


@name_defaults
class Recipe:
    """Recipe of a training.

    Args:
        loss: `cross_entropy`, or `smooth_l1` between softmax and target.
        label_smoothing: Share of the target that is spread evenly over all classes.
        class_weights: `balanced` weighs each sample's loss by images / (classes · images of its
            class).
        optimizer: Optimizer class with its arguments.
        no_decay: Parameters without weight decay: `norm`, `bias`, or both as `norm,bias`.
        head_lr: Factor of the learning rate for the network's last layer.
        norm_bias_lr: Factor of the learning rate for the biases of norm layers.
        freeze: Blocks to freeze, with their BatchNorm statistics: a count from the input, or
            `backbone` for all but the last layer.
        schedule: Learning rate over the whole run, step by step: `constant`; `cosine` or `linear`,
            which fall to 0; `step`, divided by 10 after each third; `onecycle`, which rises from
            1/25 and falls to 0.
        warmup: Length of the warm-up: steps, or epochs such as `5ep`. The rate rises linearly. For
            `onecycle`, it rises as a cosine, by default over 30 % of the run.
        scheduler: Learning-rate scheduler class with its arguments, instead of `schedule`.
        scheduler_interval: Advance `scheduler` after each `epoch` or each `step`.
        ema: Decay of an exponential moving average of the weights, such as 0.999. The average is
            evaluated and saved.

    Raises:
        UserError: When settings contradict each other.
    """

    def __init__(
        self,
        loss: Loss = "cross_entropy",
        label_smoothing: ClosedUnitInterval = 0.0,
        class_weights: Literal["balanced"] | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9),
        no_decay: str | None = None,
        head_lr: PositiveFloat = 1.0,
        norm_bias_lr: PositiveFloat = 1.0,
        freeze: PositiveInt | Literal["backbone"] | None = None,
        schedule: Schedule | None = None,
        warmup: int | str = 0,
        scheduler: LRSchedulerCallable | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        ema: OpenUnitInterval | None = None,
    ) -> None:
        self.loss = loss
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights
        self.optimizer = optimizer
        self.freeze = freeze
        self.head_lr = head_lr
        self.norm_bias_lr = norm_bias_lr
        self.schedule = "constant" if warmup and schedule is None else schedule
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.ema = ema
        self.no_decay = set(no_decay.split(",")) if no_decay else set()
        if self.no_decay - {"norm", "bias"}:
            raise UserError(f"--model.no_decay {no_decay}: give norm, bias, or norm,bias")
        if self.schedule and scheduler:
            raise UserError(
                "--model.scheduler does not work with --model.schedule or --model.warmup: leave one out"
            )
        count, epochs, _ = str(warmup).partition("ep")
        self._warms_by_epoch = bool(epochs)
        try:
            self.warmup = float(count) if epochs else int(count)
        except ValueError:
            self.warmup = -1
        if not 0 <= self.warmup < math.inf:
            raise UserError(
                f"--model.warmup {warmup}: give steps, such as 500, or epochs, such as 5ep"
            )

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this recipe itself, because copying jsonargparse's partial functions would copy the Trainer."""
        return self

    def criterion(
        self, logits: Tensor, targets: Tensor, class_weights: Tensor | None = None
    ) -> Tensor:
        """Return each sample's loss, (B,).

        Args:
            logits: (B, classes).
            targets: Labels (B,), or probabilities (B, classes).
            class_weights: Factor of each class, (classes,), or None.
        """
        smoothing = self.label_smoothing
        class_weights = None if class_weights is None else class_weights.to(logits.dtype)
        if self.loss == "cross_entropy":
            return F.cross_entropy(
                logits, targets, class_weights, reduction="none", label_smoothing=smoothing
            )
        classes = logits.shape[1]
        wanted = F.one_hot(targets, classes).to(logits.dtype) if targets.ndim == 1 else targets
        factor = 1.0 if class_weights is None else wanted @ class_weights
        if smoothing:
            wanted = wanted * (1 - smoothing) + smoothing / classes
        return F.smooth_l1_loss(logits.softmax(1), wanted, reduction="none").mean(1) * factor

    def make_optimizer(self, network: nn.Module, parameters: list[nn.Parameter]) -> Optimizer:
        """Create the optimizer, with a parameter group for each combination of weight decay and learning rate.

        Args:
            network: The network, which is searched for norm layers, biases and the head.
            parameters: The parameters to train.
        """
        norms = filter(_is_norm, network.modules())
        factors = {id(getattr(norm, "bias", None)): self.norm_bias_lr for norm in norms}
        factors |= (
            {id(p): self.head_lr for p in head_of(network)[1].parameters()}
            if self.head_lr != 1
            else {}
        )
        plain = {id(p) for p in self._without_decay(network)}
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault((factors.get(id(parameter), 1), id(parameter) in plain), []).append(
                parameter
            )
        if groups.keys() <= {(1, False)}:
            return self.optimizer(parameters)
        decay = [{}, {"weight_decay": 0.0}]
        optimizer = self.optimizer(
            [{"params": group, **decay[plain]} for (_, plain), group in groups.items()]
        )
        for (factor, _), group in zip(groups, optimizer.param_groups, strict=True):
            group["lr"] *= factor
        return optimizer

    def _without_decay(self, network: nn.Module) -> Iterator[nn.Parameter]:
        for module in network.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if ("norm" if _is_norm(module) else name) in self.no_decay:
                    yield parameter

    def make_scheduler(
        self, optimizer: Optimizer, steps: float, steps_per_epoch: float
    ) -> LambdaLR:
        """Create the scheduler of `schedule`, which advances after each optimizer step.

        Args:
            optimizer: The optimizer.
            steps: Optimizer steps of the whole run.
            steps_per_epoch: Optimizer steps of an epoch.

        Raises:
            UserError: When the run has no fixed length, or the warm-up is not shorter than the run.
        """
        assert self.schedule is not None
        if not math.isfinite(steps) or steps < 0:
            raise UserError(
                f"--model.schedule {self.schedule} needs the run's length: give --trainer.max_epochs"
            )
        warmup = round(self.warmup * (math.ceil(steps_per_epoch) if self._warms_by_epoch else 1))
        if self.schedule == "onecycle" and not warmup:
            warmup = int(0.3 * steps)
        if warmup >= max(steps, 1):
            raise UserError(
                f"--model.warmup is {warmup:,} steps, but the run has only {steps:,.0f}: give less"
            )
        # LambdaLR does not save a partial's arguments; so a resumed run uses its own length, not
        # the checkpoint's
        return LambdaLR(optimizer, partial(rate, self.schedule, warmup, int(steps)))


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def rate(schedule: Schedule, warmup: int, steps: int, step: int) -> float:
    """Return the learning rate at a step, relative to the highest rate.

    Args:
        schedule: Name of the schedule.
        warmup: Steps of warm-up.
        steps: Steps of the whole run.
        step: The step, from 0.
    """
    if step < warmup:
        return (
            1 - 0.96 * _falling(step / warmup)
            if schedule == "onecycle"
            else (step + 1) / (warmup + 1)
        )
    done = min((step - warmup) / (steps - warmup), 1.0)
    return {
        "constant": 1.0,
        "cosine": _falling(done),
        "linear": 1 - done,
        "onecycle": _falling(done),
        "step": 0.1 ** int(3 * done),
    }[schedule]


_AVERAGING = "lightning.pytorch.callbacks.weight_averaging:WeightAveraging"


@expects(
    f"{_AVERAGING}._average_model", f"{_AVERAGING}._latest_update_step", "torch:_foreach_lerp_"
)
class MovingAverage(WeightAveraging):
    """Exponential moving average of the weights, updated in one call without a device-to-host sync.

    Args:
        decay: Decay at each optimizer step.
        device: Device of the average.
    """

    def __init__(self, decay: float, device: torch.device) -> None:
        super().__init__(device)
        self._decay = decay
        self._averages: list[Tensor] = []
        self._values: list[Tensor] = []
        self._counts: list[
            tuple[Tensor, Tensor]
        ] = []  # pairs of integer buffers (average, model), to copy

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Update the average after an optimizer step."""
        if trainer.global_step == self._latest_update_step:
            return
        share = (
            1 - self._decay if self._latest_update_step else 1.0
        )  # the first update copies the weights
        self._latest_update_step = trainer.global_step
        assert self._average_model is not None
        averaged = self._average_model.module
        if not self._averages:
            sides: Any = [
                [*model.parameters(), *model.buffers()] for model in (averaged, pl_module)
            ]
            for average, value in zip(*sides, strict=True):
                average.data = average.data.to(
                    value.dtype
                )  # the average was copied before the model's conversion
            self._averages, self._values = (
                [e.detach() for e in side if e.is_floating_point()] for side in sides
            )
            self._counts = [
                pair for pair in zip(*sides, strict=True) if not pair[0].is_floating_point()
            ]
        torch._foreach_lerp_(self._averages, self._values, share)
        for average, count in self._counts:
            average.copy_(count)


def _falling(done: float) -> float:
    """Return the value of a half cosine wave, which falls from 1 to 0 as `done` rises from 0 to 1."""
    return (1 + math.cos(math.pi * done)) / 2


def freeze(network: nn.Module, blocks: int | Literal["backbone"]) -> list[nn.Module]:
    """Exclude blocks from training, and return the modules to keep in evaluation mode.

    A block is a child module with parameters. In a child `nn.Sequential`, each layer with
    parameters is a block.

    Args:
        network: The network.
        blocks: Number of blocks from the input, or `backbone` for all parameters except the head's.

    Raises:
        UserError: When no block would be left to train.
    """
    if blocks == "backbone":
        head = head_of(network)[1]
        frozen = [
            module
            for module in network.modules()
            if module is not head and not [*module.children()]
        ]
        trained = {*map(id, head.parameters())}
    else:
        layers = (
            m
            for child in network.children()
            for m in (child if type(child) is nn.Sequential else [child])
        )
        split = [layer for layer in layers if [*layer.parameters()]]
        if blocks >= len(split):
            raise UserError(
                f"--model.freeze {blocks}: {type(network).__name__} has {len(split)} blocks: give less"
            )
        frozen = split[:blocks]
        trained = {id(p) for block in split[blocks:] for p in block.parameters()}
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
    return frozen
