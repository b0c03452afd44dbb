"""Recipe of a training: loss, optimizer, learning-rate schedule, frozen blocks, averaging."""

import functools
import inspect
import math
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from jsonargparse.typing import ClosedUnitInterval, OpenUnitInterval, PositiveFloat, PositiveInt
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from app.errors import UserError
from app.modules.networks import head_of
from app.system.patches import expects

Loss = Literal["cross_entropy", "smooth_l1"]
Schedule = Literal["constant", "cosine", "linear", "onecycle", "step"]

averaging = functools.cache(get_ema_multi_avg_fn)  # to make the function anew costs 40 calls


def name_defaults(cls: type) -> type:
    """Make a class's default lambdas its attributes, so that `ddp_spawn` can pickle them.

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
        no_decay: Literal["norm", "bias", "norm,bias"] | None = None,
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
        self.schedule = schedule
        if warmup and schedule is None:
            self.schedule = "constant"
        self.scheduler = scheduler
        self.scheduler_interval = scheduler_interval
        self.ema = ema
        self.no_decay = (no_decay or "").split(",")
        if self.schedule and scheduler:
            raise UserError(
                "--model.scheduler does not work with --model.schedule or --model.warmup: leave "
                "one out"
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
        """Return this recipe: copying jsonargparse's partial functions would copy the Trainer."""
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
        if class_weights is not None:
            class_weights = class_weights.to(logits.dtype)
        if self.loss == "cross_entropy":
            return F.cross_entropy(
                logits, targets, class_weights, reduction="none", label_smoothing=smoothing
            )
        classes = logits.shape[1]
        if targets.ndim == 1:
            targets = F.one_hot(targets, classes).to(logits.dtype)
        smooth = targets
        if smoothing:
            smooth = targets * (1 - smoothing) + smoothing / classes
        losses = F.smooth_l1_loss(logits.softmax(1), smooth, reduction="none").mean(1)
        if class_weights is not None:
            losses = losses * (targets @ class_weights)
        return losses

    def make_optimizer(self, network: nn.Module, parameters: list[nn.Parameter]) -> Optimizer:
        """Create the optimizer, with a group for each combination of weight decay and rate.

        Args:
            network: The network, which is searched for norm layers, biases and the head.
            parameters: The parameters to train.
        """
        factors: dict[nn.Parameter, float] = {}
        without_decay: set[nn.Parameter] = set()
        for module in network.modules():
            is_norm = "norm" in type(module).__name__.lower()
            for name, parameter in module.named_parameters(recurse=False):
                if is_norm and name == "bias":
                    factors[parameter] = self.norm_bias_lr
                kind = "norm" if is_norm else name
                if kind in self.no_decay:
                    without_decay.add(parameter)
        if self.head_lr != 1:
            factors |= dict.fromkeys(head_of(network)[1].parameters(), self.head_lr)
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            key = (factors.get(parameter, 1), parameter in without_decay)
            groups.setdefault(key, []).append(parameter)
        if groups.keys() <= {(1, False)}:
            return self.optimizer(parameters)
        settings: list[dict[str, Any]] = []
        for (_, is_plain), group in groups.items():
            settings.append({"params": group})
            if is_plain:
                settings[-1]["weight_decay"] = 0.0
        optimizer = self.optimizer(settings)
        for (factor, _), options in zip(groups, optimizer.param_groups, strict=True):
            options["lr"] *= factor
        return optimizer

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
        if not 0 <= steps < math.inf:
            raise UserError(
                f"--model.schedule {self.schedule} needs the run's length: give "
                "--trainer.max_epochs"
            )
        warmup = round(self.warmup)
        if self._warms_by_epoch:
            warmup = round(self.warmup * math.ceil(steps_per_epoch))
        if self.schedule == "onecycle" and not warmup:
            warmup = int(0.3 * steps)
        if warmup >= max(steps, 1):
            raise UserError(
                f"--model.warmup is {warmup:,} steps, but the run has only {steps:,.0f}: give less"
            )
        # LambdaLR does not save a partial's arguments; so a resumed run uses its own length, not
        # the checkpoint's
        return LambdaLR(optimizer, partial(rate, self.schedule, warmup, int(steps)))


def rate(schedule: Schedule, warmup: int, steps: int, step: int) -> float:
    """Return the learning rate at a step, relative to the highest rate.

    Args:
        schedule: Name of the schedule.
        warmup: Steps of warm-up.
        steps: Steps of the whole run.
        step: The step, from 0.
    """
    if step < warmup:
        if schedule == "onecycle":
            return 1 - 0.96 * _falling(step / warmup)
        return (step + 1) / (warmup + 1)
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return {
        "constant": 1.0,
        "cosine": _falling(done),
        "linear": 1 - done,
        "onecycle": _falling(done),
        "step": 0.1 ** int(3 * done),
    }[schedule]


@expects("lightning.pytorch.callbacks.weight_averaging:WeightAveraging._average_model")
class MovingAverage(WeightAveraging):
    """Exponential moving average of the weights, updated in one call without a device-to-host sync.

    Args:
        decay: Decay at each optimizer step.
        device: Device of the average.
    """

    def __init__(self, decay: float, device: torch.device) -> None:
        super().__init__(device)
        self._decay = decay
        self._updated_step = 0
        self._averages: list[Tensor] = []
        self._values: list[Tensor] = []
        # pairs of integer buffers (average, model), to copy
        self._counts: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Update the average after an optimizer step."""
        if trainer.global_step == self._updated_step:
            return
        if not self._averages:
            self._pair(pl_module)
        pairs = self._counts
        if self._updated_step:
            averaging(self._decay)(self._averages, self._values, 0)
        else:  # the first update copies the weights
            pairs = [*pairs, *zip(self._averages, self._values, strict=True)]
        for average, value in pairs:
            average.copy_(value)
        self._updated_step = trainer.global_step

    def _pair(self, model: LightningModule) -> None:
        """Pair the average's tensors with the model's."""
        assert self._average_model is not None
        averaged = self._average_model.module
        averages = [*averaged.parameters(), *averaged.buffers()]
        for average, value in zip(averages, [*model.parameters(), *model.buffers()], strict=True):
            # the average was copied before the model's conversion
            average.data = average.data.to(value.dtype)
            if value.is_floating_point():
                self._averages.append(average.detach())
                self._values.append(value.detach())
            else:
                self._counts.append((average, value))

    def state_dict(self) -> dict[str, Any]:
        """Return the last step in the average."""
        return {"latest_update_step": self._updated_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the last step in the average."""
        self._updated_step = state_dict["latest_update_step"]


def _falling(done: float) -> float:
    """Return a half cosine wave, which falls from 1 to 0 as `done` rises from 0 to 1."""
    return (1 + math.cos(math.pi * done)) / 2


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm layer."""
    return isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm)


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
        trained = [head_of(network)[1]]
        frozen = [module for module in network.modules() if not list(module.children())]
        frozen.remove(trained[0])
    else:
        layers: list[nn.Module] = []
        for child in network.children():
            layers += child if type(child) is nn.Sequential else [child]
        layers = [layer for layer in layers if list(layer.parameters())]
        if blocks >= len(layers):
            raise UserError(
                f"--model.freeze {blocks}: {type(network).__name__} has {len(layers)} blocks: "
                "give less"
            )
        frozen = layers[:blocks]
        trained = layers[blocks:]
    kept = set(nn.ModuleList(trained).parameters())
    for parameter in set(network.parameters()) - kept:
        parameter.requires_grad_(False)
    return frozen
