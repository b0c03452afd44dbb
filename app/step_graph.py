"""Training step as one CUDA graph: forward pass, loss, backward pass and update in one launch.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

WARM_UP = 3  # steps before the first graph, in which libraries choose kernels and the optimizer creates its state

Scores = tuple[Tensor, Tensor]  # loss of each sample (B,), logits (B, classes)


class Graph:
    """CUDA graph of a function, recorded once and replayed on the same memory.

    Args:
        work: Function to record; each replay overwrites the tensors that the function has returned.
    """

    def __init__(self, work: Callable[[], Scores]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local", because other threads may use the GPU, such as a loader's thread that pins memory
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = work()

    def replay(self) -> Scores:
        """Replay the graph, and return the recorded tensors."""
        self._graph.replay()
        return self._results


class StepGraph:
    """Training step that scores a batch and updates the weights in one CUDA graph.

    The first batches, and batches of another size such as an epoch's last one, run without the graph; Lightning then
    calls backward and update. All other batches replay the graph; hooks such as `on_after_backward` see no gradients.
    When a setting of the optimizer changes, a new graph is recorded.

    Args:
        score: Function from images and labels to losses and logits.
        optimizer: Optimizer of the weights. Its `step` is replaced, so that it does not update again after a replay.
    """

    def __init__(self, score: Callable[[Tensor, Tensor], Scores], optimizer: Optimizer) -> None:
        self._score, self._optimizer = score, optimizer
        self._update = optimizer.step
        self._graph: Graph | None = None
        self._settings: list[Any] = []
        self._images = self._labels = torch.empty(0)
        self._seen = 0
        self._is_updated = False

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = closure() if closure else None
            if not self._is_updated:
                self._update()
            self._is_updated = False
            return loss

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers require a bound method

    def __call__(self, images: Tensor, labels: Tensor) -> Scores:
        """Return losses (B,) and logits (B, classes) of images (B, C, H, W) and labels (B,)."""
        if self._seen == 0:
            self._images, self._labels = images.clone(), labels.clone()
        is_same_size = images.shape == self._images.shape
        self._seen += is_same_size
        if not is_same_size or self._seen <= WARM_UP:
            return self._score(images, labels)
        self._images.copy_(images)
        self._labels.copy_(labels)
        settings = [value for group in self._optimizer.param_groups for key, value in group.items() if key != "params"]
        if self._graph is None or settings != self._settings:
            self._graph, self._settings = None, settings  # free the old graph's memory first
            self._optimizer.zero_grad()
            self._graph = Graph(self._work)
        self._is_updated = True
        return self._graph.replay()

    def _work(self) -> Scores:
        losses, logits = self._score(self._images, self._labels)
        with torch.autocast(losses.device.type, enabled=False):
            (losses.sum() * (1 / len(losses))).backward()
            self._update()
        return losses.detach(), logits.detach()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, except after a replay; replaces `LightningModule.backward`."""
        if not self._is_updated:
            loss.backward(*args, **kwargs)
