"""LightningModules: loss, metrics, optimizer and predictions for image classifiers."""

import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, Self

import torch
from jsonargparse.typing import PositiveInt
from lightning import Callback, LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from app.data.batches import GlobalBatches
from app.data.module import ImageData
from app.errors import UserError
from app.modules.execution import Compile, Execution, MatmulPrecision, fastest
from app.modules.networks import (
    MLP,
    SIZES,
    WhitenedCNN,
    head_of,
    make_network,
    own_network,
    shape_problem,
    title,
)
from app.modules.probe import Probe
from app.modules.recipe import Loss, MovingAverage, Recipe, freeze, is_batch_norm, name_defaults
from app.modules.sums import Sums, log_window
from app.modules.weights import load_weights, read_weights

Batch = tuple[Tensor, Tensor]  # images (B, C, H, W), and labels (B,)


class ImageClassifier(LightningModule):
    """LightningModule for image classification: loss, metrics, optimizer, predictions.

    A batch is a pair of images (B, C, H, W) and labels (B,). Metrics accumulate on the device and
    are means over the samples of all ranks. `train_loss_step` is logged every `log_every_n_steps`
    steps, all other metrics once per epoch.

    Args:
        network: Network that maps images to logits. As text: `lenet`, `resnet18_cifar`, a network
            of `torchvision.models`, `timm/NAME`, or the import path of a function or class that
            takes the number of classes.
        num_classes: Number of classes; on the command line, it comes from the data.
        weights: Weights to begin with: a file (torch or safetensors), a run's folder, or `DEFAULT`
            for the published weights of torchvision or timm. The last layer is new if its size
            differs.
        head: First weights of the last layer: `probe` fits them to the training images by logistic
            regression, whose accuracy is that of epoch 0; `random`; `auto`: `probe` if `weights`
            are given and the layer is new.
        keep_statistics: Keep the statistics of BatchNorm; `auto`: if `weights` are given.
        channels_last: Store images and convolution weights as (N, H, W, C). `auto`: on a CPU, if
            the network has convolutions; on a GPU in 16 bits, if some of them have 32 channels or
            more.
        compile: Compile the network with `torch.compile`: `default`, or `reduce-overhead`, with
            CUDA graphs.
        matmul_precision: Float32 products on a GPU: `highest` in float32, `high` in TF32, `medium`
            in bfloat16 or TF32.
        views: Test-time augmentation: evaluate an image by the mean logits of several views.
            `mirror` adds the mirror image. `shift` adds two copies moved by one pixel, up left and
            down right, and mirrors all three: 6 views.
        **recipe: Arguments of `Recipe`.

    Attributes:
        recipe: The recipe.
        executed: Execution settings in effect, for the run record.
        images: Properties of the training images, from a loaded checkpoint: `class_names`,
            `image_shape` (C, H, W), `mean`, `std`, and for `EncodedImages` also `resize` and
            `interpolation`. None without a loaded checkpoint, or if the training's data module was
            not an `ImageData`.
        logs_evaluation: Whether loggers get the metrics of validation and test.

    Raises:
        UserError: When there are fewer than two classes.
    """

    logs_evaluation = True
    # a batch may be empty, because `training_step` weights batches by their samples
    accepts_empty = True
    sums: Sums  # set in setup for training

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Name lambdas among the subclass's defaults, so that `ddp_spawn` can pickle them."""
        super().__init_subclass__(**kwargs)
        name_defaults(cls)

    def __init__(
        self,
        network: str | nn.Module = "resnet18",
        num_classes: int = 10,
        weights: str | None = None,
        head: Literal["auto", "probe", "random"] = "auto",
        keep_statistics: bool | Literal["auto"] = "auto",
        channels_last: bool | Literal["auto"] = "auto",
        compile: Compile | bool = "off",
        matmul_precision: MatmulPrecision = "highest",
        views: Literal["mirror", "shift"] | None = None,
        **recipe: Any,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise UserError(
                f"a classifier needs two classes or more, not {num_classes}: add a class to --data"
            )
        self.recipe = Recipe(**recipe)
        self.views = views
        self.network_name = network if isinstance(network, str) else type(network).__name__
        self.network = make_network(network, num_classes) if isinstance(network, str) else network
        self.weights = weights
        self._frozen = freeze(self.network, self.recipe.freeze) if self.recipe.freeze else []
        self._keeps_statistics = keep_statistics
        if keep_statistics == "auto":
            self._keeps_statistics = weights is not None
        self.probe = Probe(head, self.recipe.freeze == "backbone")
        if self._frozen or self._keeps_statistics:
            warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")
        self.execution = Execution(channels_last, compile, matmul_precision)
        self.executed: dict[str, Any] = {}
        self.images: dict[str, Any] | None = None
        metrics: dict[str, Metric | MetricCollection] = {
            "loss": MeanMetric(nan_strategy="disable"),
            "acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
            "f1": MulticlassF1Score(num_classes, validate_args=False),
        }
        if num_classes > 10:
            metrics["top5"] = MulticlassAccuracy(
                num_classes, top_k=5, average="micro", validate_args=False
            )
        self.val_metrics = MetricCollection(metrics, prefix="val_", compute_groups=False)
        self.test_metrics = self.val_metrics.clone(prefix="test_")
        # not a buffer, because the moving average would average it
        self.class_weights: Tensor | None = None
        self.train()  # our override keeps frozen blocks in evaluation mode
        if type(self) is ImageClassifier:
            self.save_hyperparameters(ignore=["optimizer", "scheduler"])

    def prepare_data(self) -> None:
        """Download published weights to train with, in one process per node."""
        if self.weights == "DEFAULT" and self.trainer.state.fn == "fit":
            read_weights(self.weights, self.network_name)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, except for frozen blocks and kept statistics."""
        super().train(mode)
        for block in self._frozen:
            block.eval()
        for module in self.network.modules():
            if self._keeps_statistics and is_batch_norm(module):
                module.eval()
        return self

    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks that fit the head, and average the weights, if they are needed."""
        trainer = self.trainer
        callbacks: list[Callback] = []
        if trainer.state.fn != "fit":
            # hide Lightning's advice to restore the average, because the weights are the average
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
            return callbacks
        if self.probe.is_needed(self.weights is not None):
            callbacks.append(self.probe)
        if self.recipe.ema is not None:
            callbacks.append(MovingAverage(self.recipe.ema, trainer.strategy.root_device))
        return callbacks

    def setup(self, stage: str) -> None:
        """Prepare network and metrics.

        Reset the metrics, because spawned processes would otherwise share the memory of the
        metrics' states. Sum losses in float64, so that the order of additions does not change the
        logged values.
        """
        # hide Lightning's advice to use sync_dist, because `Sums` and torchmetrics already add up
        # over ranks
        warnings.filterwarnings(
            "ignore", r".*'(train|val|test)_(loss|acc|loss_step|f1|top5)'.*sync_dist=True"
        )
        device = self.trainer.strategy.root_device
        self.executed = self.execution.prepare(self.network, device, str(self.trainer.precision))
        for metric in self.modules():
            if isinstance(metric, MeanMetric) and device.type != "mps":  # MPS lacks float64
                metric.set_dtype(torch.float64)
            if isinstance(metric, Metric):
                metric.reset()
        if stage == "fit":
            if self.weights is not None:
                content = read_weights(self.weights, self.network_name)
                message, has_new_head = load_weights(self.network, content, self.weights)
                rank_zero_info(message)
                self.probe.has_new_head = has_new_head
            elif isinstance(self.network, WhitenedCNN):
                data = self._image_data("--model.network whitened", "show its images")
                self.network.whiten(data.sample())
            if self.recipe.class_weights is not None:
                data = self._image_data("--model.class_weights balanced", "count its classes")
                counts = data.class_counts.to(self.device)
                self.class_weights = counts.sum() / (len(counts) * counts.clamp(min=1))
            self.sums = Sums(device)

    def _image_data(self, flag: str, purpose: str) -> ImageData:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, ImageData):
            raise UserError(
                f"{flag}: {type(data).__name__} does not {purpose}: use a data class of this "
                "application"
            )
        return data

    def check_image_shape(self, shape: Sequence[int]) -> None:
        """Raise a UserError if the network rejects images of a shape (C, H, W), but not others."""
        if own_network(self.network_name) and shape == (3, 32, 32):
            return  # they all take CIFAR's images; a convolution on the meta device imports SymPy
        reason = shape_problem(self.network, shape)
        if reason is None or "meta" in reason:  # the network cannot run on the meta device
            return
        for channels, size in product((shape[0], 3, 1), SIZES):
            if shape_problem(self.network, (channels, size, size)) is None:
                here = "×".join(map(str, shape))
                raise UserError(
                    f"{title(self.network_name)} takes images of {channels}×{size}×{size}, for "
                    f"example, not of {here} ({reason}): choose another --data or --model "
                    f"(Synthetic: --data.like; your own images: --data.size {size} "
                    f"--data.channels {channels})"
                )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) of images; in evaluation, a mean over views.

        Args:
            images: (B, C, H, W), or the last layer's inputs, (B, D).
        """
        if images.ndim == 2:
            return head_of(self.network)[1](images)
        if self.training or self.views is None:
            return self.network(images)
        moved = [images]
        if self.views == "shift":
            padded = functional.pad(images, (1, 1, 1, 1), "replicate")
            moved += [padded[:, :, 2:, 2:], padded[:, :, :-2, :-2]]
        logits = []
        for view in moved:
            logits += [self.network(view), self.network(view.flip(3))]
        return torch.stack(logits).mean(0)

    def _step(self, batch: Batch, metrics: MetricCollection) -> Tensor:
        """Update the metrics with a batch, and return its logits (B, classes)."""
        images, labels = batch
        logits = self(images)
        if len(labels):  # a rank's share of the last batch may be empty
            metrics.update(value=self.recipe.criterion(logits, labels), preds=logits, target=labels)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the batch's loss.

        With this application's data, it is a sum in which all samples of an optimizer step count
        equally. Elsewhere, it is the mean, which the training loop weights, as it does a user's.
        """
        images, labels = batch
        trainer = self.trainer
        losses = self._training_losses(images, labels, batch_idx)
        loader = trainer.train_dataloader
        if isinstance(loader, GlobalBatches) and not loader.order.virtual_devices:
            return losses.sum() * loader.order.loss_weight(trainer, batch_idx)
        return losses.sum() / max(len(labels), 1)  # the mean, or 0 for an empty batch

    def _training_losses(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        """Return the losses (B,) of images (B, C, H, W), and add them to the sums."""
        try:
            logits = self(images)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise UserError(
                f"batch {batch_idx} leaves a single image on a device, too few for BatchNorm: "
                "use --data.drop_last true, or another --data.batch_size"
            ) from error
        losses = self.recipe.criterion(logits, labels, self.class_weights)
        self.sums.add(losses.detach(), logits, labels)
        return losses

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the mean loss every `log_every_n_steps` steps."""
        trainer = self.trainer
        if (trainer.global_step + 1) % log_window(trainer) == 0:
            self.log_dict(
                self.sums.end_window(trainer), on_step=True, on_epoch=False, prog_bar=True
            )

    def on_train_epoch_end(self) -> None:
        """Log the epoch's mean loss and accuracy."""
        self.log_dict(self.sums.end_epoch(self.trainer))

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update the validation metrics, and return logits (B, classes)."""
        return self._step(batch, self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        """Log the means over the validation split."""
        self._log(self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update the test metrics, and return logits (B, classes)."""
        return self._step(batch, self.test_metrics)

    def on_test_epoch_end(self) -> None:
        """Log the means over the test split."""
        self._log(self.test_metrics)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return a batch's class probabilities, (B, classes)."""
        return self(batch[0]).float().softmax(1)

    def _log(self, metrics: MetricCollection) -> None:
        values = {name: value.float() for name, value in metrics.compute().items()}
        self.log_dict(values, logger=self.logs_evaluation)
        metrics.reset()

    def make_optimizer(self) -> Optimizer:
        """Create the optimizer of the trainable parameters."""
        return self.recipe.make_optimizer(
            self.network, [p for p in self.parameters() if p.requires_grad]
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create the optimizer and the scheduler."""
        trainer = self.trainer
        recipe = self.recipe
        clips = "mixed" in trainer.precision and bool(trainer.gradient_clip_val)
        optimizer = fastest(self.make_optimizer(), clips)
        if recipe.scheduler is not None:
            scheduler: Any = recipe.scheduler(optimizer)
        # a run of no batches has no steps to schedule
        elif recipe.schedule is not None and trainer.limit_train_batches:
            trainer.fit_loop.setup_data()  # sets num_training_batches
            steps = trainer.estimated_stepping_batches
            epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
            scheduler = recipe.make_scheduler(optimizer, steps, epoch)
        else:
            return optimizer
        interval = recipe.scheduler_interval if recipe.schedule is None else "step"
        monitor = getattr(scheduler, "monitor", "val_loss")
        lr_scheduler: Any = {"scheduler": scheduler, "interval": interval, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": lr_scheduler}

    def on_train_start(self) -> None:
        """Set the learning rate from this run's schedule; the checkpoint's run may be longer."""
        for config in self.trainer.lr_scheduler_configs:
            if self.recipe.schedule and isinstance(config.scheduler, LambdaLR):
                scheduler = config.scheduler
                groups = scheduler.optimizer.param_groups
                bases = map(float, scheduler.base_lrs)
                for group, base, factor in zip(groups, bases, scheduler.lr_lambdas, strict=True):
                    group["lr"] = base * factor(scheduler.last_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the unfinished epoch's sums, and the image properties that a prediction needs.

        A resumed epoch needs the sums to log the mean over the whole epoch. Collective: every rank
        must call it.
        """
        checkpoint["sums"] = self.sums.state_dict(self.trainer)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, ImageData):
            source = data.source
            images = {
                "class_names": list(source.class_names),
                "image_shape": list(source.image_shape),
                "mean": list(source.mean),
                "std": list(source.std),
            }
            geometry = getattr(source, "geometry", None)
            if geometry:
                images["resize"] = geometry.resize
                images["interpolation"] = geometry.interpolation
            checkpoint["images"] = images

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the unfinished epoch's sums, and the properties of the images."""
        self.images = checkpoint.get("images")
        is_trained = hasattr(self, "sums") and self.trainer.state.fn == "fit"
        if is_trained and "sums" in checkpoint:
            self.sums.load_state_dict(self.trainer, checkpoint["sums"])


class CIFARCNN(ImageClassifier):
    """CNN for CIFAR-10: LeNet by default, a ResNet-18, or a network that trains fast.

    Args:
        network: `lenet`: the CNN of PyTorch's CIFAR-10 tutorial, 62,006 parameters. `resnet18`:
            torchvision's, unchanged. `resnet18_cifar`: with the usual stem for small images.
            `whitened`: with a first layer that whitens the training images' patches.
        num_classes: Number of classes; on the command line, it comes from the data.
        **kwargs: As for `ImageClassifier`.
    """

    def __init__(
        self,
        network: Literal["lenet", "resnet18", "resnet18_cifar", "whitened"] = "lenet",
        num_classes: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, num_classes, **kwargs)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])


class FashionMLP(ImageClassifier):
    """Multilayer perceptron for FashionMNIST; copies of each image widen the first layer.

    Args:
        repeats: Number of copies of each image; the input layer is 28·28·repeats wide.
        hidden: Widths of the hidden layers.
        num_classes: Number of classes; on the command line, it comes from the data.
        loss: Smooth L1 between softmax and target, or cross-entropy.
        optimizer: Optimizer class with its arguments.
        **kwargs: As for `ImageClassifier`.
    """

    def __init__(
        self,
        repeats: PositiveInt = 24,
        hidden: Sequence[PositiveInt] = (256, 256, 256),
        num_classes: int = 10,
        loss: Loss = "smooth_l1",
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3),
        **kwargs: Any,
    ) -> None:
        network = MLP(repeats, hidden, num_classes)
        super().__init__(network, num_classes, loss=loss, optimizer=optimizer, **kwargs)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
