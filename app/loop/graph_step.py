"""Training steps as two CUDA graphs: the first prepares the batches, the second trains on them.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.profilers import PassThroughProfiler
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from app.data.batches import GlobalBatches, RawBatch, Rows
from app.errors import UserError
from app.loop.straight_step import Step, StraightLoop, overrides
from app.modules import ImageClassifier
from app.recipe import rates_of
from app.training_sums import log_window

MOST = 16  # maximum number of steps in one graph
PIXELS = 2**24  # maximum number of values (images · C · H · W) in one graph, because more would only take memory
WARM_UP = 3  # number of steps before the first graph, so that libraries choose kernels and the optimizer has its state
# hooks that act between the phases of a step
HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
BATCH = ("on_train_batch_start", "on_train_batch_end")
STEP = (*HOOKS, "training_step", "backward", "optimizer_zero_grad", "optimizer_step")


class Graph:
    """CUDA graph of a function, recorded once and replayed on the same memory.

    Args:
        work: Function to record.

    Attributes:
        results: Tensors that the function has returned; each replay overwrites them.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # autograd may remember the warm-up's stream, but a recording must not wait for it. `override` prevents
        # the wait; in torch 2.11, it does nothing, because torch lacks the function
        override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", lambda enabled: None)
        override(True)
        try:
            # "thread_local", because other threads, such as a loader's thread that pins memory, may use the GPU
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.results = work()
        except RuntimeError as error:  # raise the first error: ending a failed recording raises another one
            raise (error.__context__ or error) from None
        finally:
            override(False)

    def replay(self) -> Any:
        """Replay the graph, and return the recorded tensors."""
        self._graph.replay()
        return self.results


class Block:
    """Consecutive training steps as two CUDA graphs.

    Args:
        inputs: One batch with the samples of all steps; the block copies it into its memory.
        prepare: Function that gathers, augments and normalises the inputs; None for a prepared batch.
        steps: Number of steps.
        device: Device of the graphs.

    Attributes:
        batches: For each step, images (B, C, H, W) and labels in the memory that the training graph reads.
        training: Graph of all steps, which returns their losses (steps,); None before its capture.
    """

    training: Graph | None = None

    def __init__(self, inputs: Any, prepare: Callable[[Any], Any] | None, steps: int, device: torch.device) -> None:
        held = self._inputs = apply_to_collection(inputs, Tensor, lambda value: value.to(device, copy=True))
        self._preparation = Graph(lambda: prepare(held)) if prepare is not None else None
        batch = held if self._preparation is None else self._preparation.results
        self.batches = [batch] if steps == 1 else list(zip(*(tensor.chunk(steps) for tensor in batch), strict=True))

    def prepare(self, inputs: Any) -> None:
        """Copy the inputs into the block's memory, and prepare the batches."""
        for value, new in zip(self._inputs, inputs, strict=True):
            if isinstance(new, Tensor):
                value.copy_(new, non_blocking=True)
        if self._preparation is not None:
            self._preparation.replay()


class Graphs:
    """Memory and CUDA graphs of training steps.

    Args:
        step: The step to capture.

    Attributes:
        loader: Loader of the batches.
        batch: Images (B, C, H, W) and labels in the memory that the training graph reads; None during the warm-up.
        ahead: Number of steps that the block includes, but the loop has not reached.
    """

    batch: Any = None
    ahead = 0
    _block: Block

    def __init__(self, step: "GraphStep") -> None:
        self._step, self._preparations = step, step.preparation
        self.loader = step.trainer.train_dataloader
        self._size: int | None = getattr(self.loader, "batch_size", None)
        # start the backward pass from each sample's loss: this saves four operations per step, and changes no result
        self._from_losses = isinstance(self.loader, GlobalBatches) and step.plain_backward
        self._warm_up, self._replays = WARM_UP, 0
        self._blocks: dict[int, Block] = {}
        self._losses: list[Tensor] = []
        groups = step.optimizer.param_groups
        self._settings: list[Any] = []
        self._rates = [[group["lr"]] * MOST for group in groups]
        device = step.strategy.root_device
        self._rates_on_device = [torch.tensor(rates, device=device).unbind() for rates in self._rates]

    def prepare(self, batch: Any, steps: Callable[[Rows], int]) -> Any:
        """Prepare a batch. After the warm-up, write a full batch into the memory that the training graph reads.

        Args:
            batch: The batch.
            steps: Function that returns the number of steps to run in one graph, beginning with the given batch.
        """
        if self.ahead:
            self.batch = self._block.batches[-self.ahead]
            self.ahead -= 1
            return self.batch
        is_raw = isinstance(batch, Rows) or (isinstance(batch, RawBatch) and batch.mix is None)
        inputs = batch if is_raw else self._prepare(batch)
        size = batch.size if isinstance(batch, Rows) else len(inputs[1])
        self._size = self._size or size
        if size != self._size or self._warm_up:
            self._warm_up -= size == self._size
            return self._prepare(batch) if is_raw else inputs
        count = 1
        if isinstance(batch, Rows):
            count = steps(batch)
            inputs = batch.alone(count)
        if count not in self._blocks:
            device = self._step.strategy.root_device
            self._blocks[count] = Block(inputs, self._prepare if is_raw else None, count, device)
        self._block = self._blocks[count]
        self._block.prepare(inputs)
        self.ahead = count - 1
        self.batch = self._block.batches[0]
        return self.batch

    def _prepare(self, batch: Any) -> Any:
        for prepare in self._preparations:
            batch = prepare(batch)
        return batch

    def train(self) -> Tensor:
        """Return the step's loss. On a block's first step, train on all batches of the block.

        Raises:
            UserError: When the optimizer's settings, apart from the learning rate, change at each step.
        """
        if not self._losses:
            self._losses = [*self._replay().unbind()]
        self._step.module.sums.count += self._size
        return self._losses.pop(0)

    def _replay(self) -> Tensor:
        """Train on the batches of the block, and return the losses, (steps,)."""
        groups, block = self._step.optimizer.param_groups, self._block
        settings = [value for group in groups for name, value in group.items() if name not in ("params", "lr")]
        for group, coming in enumerate(self._coming_rates()):
            for place, rate in enumerate(coming):
                if rate != self._rates[group][place]:
                    self._rates[group][place] = rate
                    self._rates_on_device[group][place].fill_(rate)
        if settings != self._settings:
            if self._replays == 1:
                problem = "the scheduler changes more than the learning rate, such as the momentum, at each step"
                remedy = "use --model.schedule, or leave cuda_graph out"
                raise UserError(f"--model.cuda_graph true: {problem}: {remedy}")
            self._settings, self._replays = settings, 0
            for cached in self._blocks.values():
                cached.training = None  # free it before the new capture
        if block.training is None:
            self._step.optimizer.zero_grad()
            block.training = Graph(self._train)
            self._step.optimizer.zero_grad()
            self._step.loop.captured = True
        self._replays += len(block.batches)
        return block.training.replay().clone()

    def _coming_rates(self) -> list[list[float]]:
        """Return the learning rates of the block's steps, for each parameter group."""
        steps = range(len(self._block.batches))
        for config in self._step.trainer.lr_scheduler_configs if self.ahead else ():
            if config.interval == "step":
                rates = (rates_of(config.scheduler, step) for step in steps)
                return [list(group) for group in zip(*rates, strict=True)]
        return [[group["lr"] for _ in steps] for group in self._step.optimizer.param_groups]

    def _train(self) -> Tensor:
        step, batches = self._step, self._block.batches
        groups, sums, losses = step.optimizer.param_groups, step.module.sums, []
        count, rates = sums.count, [group["lr"] for group in groups]
        step.module.sums_losses, gradient = not self._from_losses, None
        with sums.together() if len(batches) > 1 else nullcontext():
            for place, batch in enumerate(batches):
                step.optimizer.zero_grad()
                loss = step.training_step(batch, 0)
                if self._from_losses:
                    gradient = torch.full_like(loss, 1 / self.loader.batch_size) if gradient is None else gradient
                    loss.backward(gradient)
                else:
                    step.backward(loss)
                step.clip_gradients()
                for group, on_device in zip(groups, self._rates_on_device, strict=True):
                    group["lr"] = on_device[place]  # a tensor, so that a new learning rate needs no new graph
                step.optimizer.step()
                losses.append(loss.detach())
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        sums.count, step.module.sums_losses = count, True
        return torch.stack(losses).sum(1) * (1 / self.loader.batch_size) if self._from_losses else torch.stack(losses)


class GraphStep(Step):
    """Training step that replays CUDA graphs.

    The first batches, and batches of another size such as an epoch's last one, run without graphs. For all others, a
    first graph gathers, augments and normalises the images. A second graph computes the loss, adds it to the sums,
    computes and clips gradients, and updates the weights. The first graph serves only `ImageData` without mixup and
    cutmix; other batches are prepared by ordinary calls. Hooks see no gradients.

    With `--data.placement device`, a graph holds up to 16 steps. The first of these steps launches the graph; in the
    others, the loop only counts the step and calls the hooks. Only a graph's last step may be followed by an event that
    reads the weights: the end of a logging window or an epoch, a validation, a checkpoint. A callback that overrides a
    batch hook may read them, too. Its attribute `looks_every` is the number of steps between two reads; 0 means never.
    If the callback has no such attribute, a graph holds one step, because the callback may read after each step.

    Args:
        loop: The loop.
    """

    loop: "GraphLoop"

    def __init__(self, loop: "GraphLoop") -> None:
        super().__init__(loop)
        if loop.graphs is None or loop.graphs.loader is not self.trainer.train_dataloader:
            loop.graphs = Graphs(self)
        self.graphs = loop.graphs
        self.preparation = [self._part("batch_to_device", partial(self.graphs.prepare, steps=self._steps))]
        self._watchers = [callback for callback in self.callbacks if overrides(callback, Callback, *BATCH)]
        self._most = self._most_steps()
        self._replay = self._part("training_step", self.graphs.train)
        self._update_without, self.update = self.update, self._update

    def _update(self) -> None:
        if self.batch is not self.graphs.batch:
            self._update_without()
            return
        self.outputs = {"loss": self._replay()}
        self.on_before_optimizer_step(self.optimizer)

    def _most_steps(self) -> int:
        """Return the number of steps per graph that minimizes the replays per logging window.

        Return 1 if there is a profiler, a batch hook of the module, or a scheduler whose rates are unknown in advance.
        """
        trainer, module = self.trainer, self.module
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
        foreseen = all(type(scheduler) is LambdaLR for scheduler in schedulers)
        if type(self.profiler) is not PassThroughProfiler or overrides(module, LightningModule, *BATCH) or not foreseen:
            return 1
        window = log_window(trainer)
        return min(range(1, MOST + 1), key=lambda steps: window // steps + window % steps)  # the fewest replays

    def _steps(self, batch: Rows) -> int:
        """Return the number of steps to run in one graph; the first step is that of `batch`."""
        trainer, progress, size = self.trainer, self.loop.batch_progress, batch.size
        batches = progress.current if trainer.check_val_every_n_epoch is not None else progress.total
        step, every = trainer.global_step, trainer.val_check_batch or 1
        periods = [log_window(trainer), *(getattr(watcher, "looks_every", 1) for watcher in self._watchers)]
        room = [period - step % period for period in periods if period]
        room += [every - batches.ready % every, self.batches - progress.current.ready]
        room += [(batch.epoch.shape[1] - batch.place.start) // size, PIXELS // (size * batch.loader.images[0].numel())]
        room += [trainer.max_steps - step] if trainer.max_steps >= 0 else []
        return self._most if self._most <= min(room) else 1


class GraphLoop(StraightLoop):
    """Loop over the batches of an epoch, with a step that replays CUDA graphs.

    Attributes:
        graphs: The graphs; None outside training.
        captured: Whether a training graph has been recorded.
    """

    graphs: Graphs | None = None
    captured = False

    @property
    def ahead(self) -> int:
        """Number of steps in the current block that the loop has not reached yet."""
        return self.graphs.ahead if self.graphs is not None else 0

    def make_step(self) -> Step:
        """Look up the hooks, and return the step.

        Raises:
            UserError: When a requested feature needs Lightning's step, or runs code between the phases of a step.
        """
        trainer: Any = self.trainer
        reason, module = self.reason, trainer.lightning_module
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging) or overrides(callback, Callback, *HOOKS):
                reason = type(callback).__name__
        if overrides(module, ImageClassifier, *STEP):
            reason = f"the hooks of {type(module).__name__}"
        if reason:
            raise UserError(f"--model.cuda_graph true does not work with {reason}: leave one of them out")
        return GraphStep(self)

    def teardown(self) -> None:
        """Free the graphs' memory."""
        self.graphs = None
        super().teardown()
