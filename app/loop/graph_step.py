"""Training step as two CUDA graphs: the first prepares the batch, the second trains on it.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from app.data.batches import RawBatch, Rows
from app.errors import UserError
from app.loop.straight_step import Step, StraightLoop, overrides
from app.modules import ImageClassifier

WARM_UP = 3  # number of steps before the first graph: libraries choose kernels, and the optimizer creates its state
# hooks that act between the phases of a step
HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
STEP = (*HOOKS, "training_step", "backward", "optimizer_zero_grad", "optimizer_step")


class Graph:
    """CUDA graph of a function, recorded once and replayed on the same memory.

    Args:
        work: Function to record; each replay overwrites the tensors that the function has returned.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local", because other threads may use the GPU, such as a loader's thread that pins memory
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._results = work()
        except RuntimeError as error:  # raise the first error: ending a failed recording raises another one
            raise (error.__context__ or error) from None

    def replay(self) -> Any:
        """Replay the graph, and return the recorded tensors."""
        self._graph.replay()
        return self._results


class Graphs:
    """Memory and CUDA graphs of a training step.

    Args:
        step: The step to capture.

    Attributes:
        loader: Loader of the batches.
        batch: Images (B, C, H, W) and labels in the memory that the training graph reads; None during the warm-up.
    """

    batch: Any = None
    _inputs: Any = None
    _preparation: Graph | None = None
    _training: Graph | None = None

    def __init__(self, step: "GraphStep") -> None:
        self._step, self._preparations = step, step.preparation
        self.loader = step.trainer.train_dataloader
        self._size: int | None = getattr(self.loader, "batch_size", None)
        self._warm_up, self._replays = WARM_UP, 0
        groups = step.optimizer.param_groups
        self._settings: list[Any] = []
        self._rates = [group["lr"] for group in groups]
        self._rates_on_device = [torch.tensor(rate, device=step.strategy.root_device) for rate in self._rates]

    def prepare(self, batch: Any) -> Any:
        """Prepare a batch. After the warm-up, a full batch lies in the memory that the training graph reads."""
        is_raw = isinstance(batch, Rows) or (isinstance(batch, RawBatch) and batch.mix is None)
        inputs = batch if is_raw else self._prepare(batch)
        size = batch.table.shape[1] if isinstance(batch, Rows) else len(inputs[1])
        self._size = self._size or size
        if size != self._size or self._warm_up:
            self._warm_up -= size == self._size
            return self._prepare(batch) if is_raw else inputs
        if self._inputs is None:
            device = self._step.strategy.root_device
            held = self._inputs = apply_to_collection(inputs, Tensor, lambda value: value.to(device, copy=True))
            self._preparation = Graph(lambda: self._prepare(held)) if is_raw else None
            self.batch = held
        for value, new in zip(self._inputs, inputs, strict=True):
            if isinstance(new, Tensor):
                value.copy_(new, non_blocking=True)
        if self._preparation is not None:
            self.batch = self._preparation.replay()
        return self.batch

    def _prepare(self, batch: Any) -> Any:
        for prepare in self._preparations:
            batch = prepare(batch)
        return batch

    def train(self) -> Tensor:
        """Train on `batch`, and return its loss.

        Raises:
            UserError: When the optimizer's settings, apart from the learning rate, change at each step.
        """
        optimizer, sums = self._step.optimizer, self._step.module.sums
        groups, samples = optimizer.param_groups, sums.count + self._size
        settings = [value for group in groups for name, value in group.items() if name not in ("params", "lr")]
        for index, group in enumerate(groups):
            if group["lr"] != self._rates[index]:
                self._rates[index] = group["lr"]
                self._rates_on_device[index].fill_(group["lr"])
        if self._training is None or settings != self._settings:
            if self._replays == 1:
                problem = "the scheduler changes more than the learning rate, such as the momentum, at each step"
                remedy = "use --model.schedule, or leave cuda_graph out"
                raise UserError(f"--model.cuda_graph true: {problem}: {remedy}")
            self._settings, self._replays = settings, 0
            self._training = None  # frees its memory first
            optimizer.zero_grad()
            self._training = Graph(self._train)
            optimizer.zero_grad()
            self._step.loop.captured = True
        self._replays += 1
        sums.count = samples
        return self._training.replay().clone()

    def _train(self) -> Tensor:
        step = self._step
        loss = step.training_step(self.batch, 0)
        step.backward(loss)
        step.clip_gradients()
        for group, rate in zip(step.optimizer.param_groups, self._rates_on_device, strict=True):
            group["lr"] = rate  # a tensor, so that a new learning rate needs no new graph
        step.optimizer.step()
        for group, rate in zip(step.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        return loss.detach()


class GraphStep(Step):
    """Training step that replays CUDA graphs.

    The first batches, and batches of another size such as an epoch's last one, run without graphs. For all others, one
    graph gathers, augments and normalises the images, and a second one computes the loss, adds it to the sums, computes
    and clips gradients, and updates the weights. The first graph serves only `ImageData` without mixup and cutmix;
    other batches are prepared by ordinary calls. Hooks see no gradients.

    Args:
        loop: The loop.
    """

    loop: "GraphLoop"

    def __init__(self, loop: "GraphLoop") -> None:
        super().__init__(loop)
        if loop.graphs is None or loop.graphs.loader is not self.trainer.train_dataloader:
            loop.graphs = Graphs(self)
        self.graphs = loop.graphs
        self.preparation = [self._part("batch_to_device", self.graphs.prepare)]
        self._replay = self._part("training_step", self.graphs.train)
        self._update_without, self.update = self.update, self._update

    def _update(self) -> None:
        if self.batch is not self.graphs.batch:
            self._update_without()
            return
        self.outputs = {"loss": self._replay()}
        self.on_before_optimizer_step(self.optimizer)


class GraphLoop(StraightLoop):
    """Loop over the batches of an epoch, with a step that replays CUDA graphs.

    Attributes:
        graphs: The graphs; None outside training.
        captured: Whether a training graph has been recorded.
    """

    graphs: Graphs | None = None
    captured = False

    def make_step(self) -> Step:
        """Look up the hooks, and return the step.

        Raises:
            UserError: When a requested feature runs code between the phases of a step.
        """
        trainer: Any = self.trainer
        reason, module = self.reason, trainer.lightning_module
        for each in trainer.callbacks:
            if isinstance(each, StochasticWeightAveraging) or overrides(each, Callback, *HOOKS):
                reason = type(each).__name__
        if overrides(module, ImageClassifier, *STEP):
            reason = f"the hooks of {type(module).__name__}"
        if reason:
            raise UserError(f"--model.cuda_graph true does not work with {reason}: leave one of them out")
        return GraphStep(self)

    def teardown(self) -> None:
        """Free the graphs' memory."""
        self.graphs = None
        super().teardown()
