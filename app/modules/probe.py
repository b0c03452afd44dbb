"""Training of the head on the features of the network below it, before the first epoch.

Linear probing, then fine-tuning: Kumar et al., "Fine-tuning can distort pretrained features and
underperform out-of-distribution", 2022, https://arxiv.org/abs/2202.10054.
"""

import itertools
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import skip_init
from torch.optim import LBFGS

from app.data.batches import GlobalBatches, HostReader
from app.data.module import ImageData
from app.data.sources import Split
from app.errors import UserError
from app.modules.networks import head_of

# factors of the squared weights, for features whose variances add up to 1
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


class Probe(Callback):
    """Callback that computes features before the first epoch, and trains the head on them.

    Logistic regression gives a new head its first weights, which are validated as epoch 0. If
    neither the frozen network nor the images change during training, the training reads the
    features instead of the images.

    Args:
        head: As for `ImageClassifier`.
        is_frozen: Whether all layers below the head are frozen.

    Attributes:
        has_new_head: Whether the weights to begin with lack the head.
        seconds: Seconds of features and regression; None without a regression.
    """

    def __init__(self, head: str, is_frozen: bool) -> None:
        self.head = head
        self.is_frozen = is_frozen
        self.has_new_head = False
        self.seconds: float | None = None
        self._features: dict[str, tuple[Tensor, Tensor]] = {}  # kept ones, by split

    def is_needed(self, has_weights: bool) -> bool:
        """Return whether a run may need this callback."""
        return self.is_frozen or self.head == "probe" or (self.head == "auto" and has_weights)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compute features, fit the head and validate it, or read the features. Collective.

        Raises:
            UserError: When a requested regression is impossible.
        """
        data = trainer.datamodule
        problem = self._problem(pl_module, data)
        if problem is not None:
            if self.head == "probe":
                raise UserError(f"--model.head probe: {problem}: leave the flag out")
            return
        is_new = self.head == "probe" or (self.head == "auto" and self.has_new_head)
        fits = is_new and trainer.ckpt_path is None
        keeps_features = self.is_frozen and not data.varies
        if trainer.fast_dev_run or not (fits or keeps_features):
            return
        started = time.monotonic()
        features = {}
        for split in ("train", "val"):
            if data.counts[split]:
                features[split] = compute_features(trainer, pl_module, data.loader(split))
        if keeps_features:
            self._features = features
        if not fits:
            return
        solution = None
        if trainer.is_global_zero:
            solution = fit_head(features, data.num_classes, pl_module.class_weights)
        weight, bias = trainer.strategy.broadcast(solution)
        head: Any = head_of(pl_module.network)[1]
        with torch.no_grad():
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        self.seconds = time.monotonic() - started
        if "val" in features:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the training read kept features."""
        self._put_into(trainer.train_dataloader, "train")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the validations of `fit` read kept features."""
        if trainer.state.fn == "fit":
            self._put_into(trainer.val_dataloaders, "val")

    def _put_into(self, loader: GlobalBatches, name: str) -> None:
        """Make a loader yield kept features (N, D) in place of images."""
        if name in self._features:
            features, labels = self._features[name]
            split = Split(features.cpu(), labels)
            loader.reader = HostReader(split, torch.arange(len(labels)), loader.reader.pins)

    @staticmethod
    def _problem(module: Any, data: Any) -> str | None:
        """Return why the head cannot be trained on features, or None."""
        if not isinstance(data, ImageData):
            return f"{type(data).__name__} is no data class of this application"
        image = torch.zeros(1, *data.image_shape, device=module.device, dtype=module.dtype)
        module.eval()
        inputs = head_input(module.network, image)
        module.train()
        if inputs is None:
            return f"the last layer of {type(module.network).__name__} is not linear with a bias"
        return None


def head_input(network: Any, images: Tensor) -> Tensor | None:
    """Return the input of a network's last layer.

    Args:
        network: The network, in evaluation mode.
        images: (B, C, H, W).

    Returns:
        (B, D); None if the logits are not the output of a linear layer with a bias.
    """
    head = head_of(network)[1]
    calls: list[tuple[Tensor, Tensor]] = []
    handle = head.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    try:
        with torch.no_grad():
            logits = network.forward(images)  # not a call, which may be compiled
    finally:
        handle.remove()
    inputs, output = calls[-1]
    if isinstance(head, nn.Linear) and head.bias is not None and output is logits:
        return inputs
    return None


def compute_features(trainer: Any, module: Any, loader: GlobalBatches) -> tuple[Tensor, Tensor]:
    """Compute the input of the last layer for all samples of a loader. Collective.

    Returns:
        Features, float32 (N, D), and labels, int64 (N,), in the loader's order, on every rank.
    """
    layout = torch.contiguous_format
    if module.executed["channels_last"]:
        layout = torch.channels_last
    computed = []
    module.eval()
    batch: Any
    for batch in loader:
        if len(batch.labels):
            batch = trainer.datamodule.on_after_batch_transfer(batch.to(module.device), 0)
            images = batch[0].contiguous(memory_format=layout)
            with trainer.precision_plugin.forward_context():
                inputs: Any = head_input(module.network, images)
            computed.append(inputs.float())
    loader._iterator = None  # ends the workers; as garbage, they would wait for a time-out
    module.train()
    order = loader.order
    samples = range(len(order.rows))
    head: Any = head_of(module.network)[1]
    features = torch.zeros(len(samples), head.in_features, device=module.device)
    if computed:
        own = itertools.chain.from_iterable(samples[order.span(step)] for step in range(len(order)))
        features[list(own)] = torch.cat(computed)
    features = trainer.strategy.reduce(features, reduce_op="sum")  # each rank has its own rows
    return features, loader.split.labels[order.rows]


def fit_head(
    features: Mapping[str, tuple[Tensor, Tensor]], classes: int, class_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fit a multinomial logistic regression, whose penalty the validation selects.

    Without validation, the penalty is the middle one of `PENALTIES`.

    Args:
        features: Features (N, D) and labels (N,) of `train`, and perhaps of `val`.
        classes: Number of classes.
        class_weights: Factor of each class, (classes,), or None.

    Returns:
        Weight (classes, D) and bias (classes,) of the head, float64.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # because the number of threads may change the order of sums
    values, labels = features["train"]
    device = values.device
    if device.type != "cuda":
        device = torch.device("cpu")  # MPS lacks float64
    values = values.to(device, torch.float64)
    labels = labels.to(device)
    if class_weights is not None:
        class_weights = class_weights.to(values)
    mean = values.mean(0)
    values = values - mean
    scale = values.square().sum(1).mean().sqrt().clamp(min=1e-12)
    head = skip_init(nn.Linear, len(mean), classes, device=device, dtype=torch.float64)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    solutions = []
    for penalty in PENALTIES:  # from flat to steep, each from the solution before
        _regress(head, values / scale, labels, penalty, class_weights)
        weight = head.weight.detach() / scale
        solutions.append((weight, head.bias.detach() - weight @ mean))
    best = solutions[len(PENALTIES) // 2]
    if "val" in features:
        best = max(solutions, key=partial(_score, *features["val"]))
    torch.set_num_threads(threads)
    return best[0].cpu(), best[1].cpu()


def _regress(
    head: Any, inputs: Tensor, labels: Tensor, penalty: float, class_weights: Tensor | None
) -> None:
    """Minimise the mean cross-entropy plus the penalised squares of a linear layer's weights.

    Args:
        head: The linear layer, float64, with the weights to start from.
        inputs: Features, float64 (N, D).
        labels: int64 (N,).
        penalty: Factor of the squared weights.
        class_weights: Factor of each class, (classes,), or None.
    """
    optimizer = LBFGS(
        head.parameters(), max_iter=500, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(head(inputs), labels, class_weights)
        loss = loss + penalty * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def _score(
    features: Tensor, labels: Tensor, solution: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """Return the accuracy of a solution, and its negative cross-entropy to break ties."""
    weight, bias = solution
    labels = labels.to(weight.device)
    logits = features.to(weight) @ weight.T + bias
    right = logits.argmax(1) == labels
    return float(right.double().mean()), -float(cross_entropy(logits, labels))
