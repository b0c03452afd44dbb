"""Training step over virtual devices: the results are bitwise equal on any number of ranks.

`--run.virtual_devices` sets the number of shards: nearly equal parts of a global batch. A rank
trains on its shards one after the other. Each shard has its own random stream, and starts from the
same buffers. Gradients, loss, logged values and changed buffers are summed in the order of
`app.training.tree`. Sources: VirtualFlow (https://arxiv.org/abs/2009.09523) and EasyScale
(https://arxiv.org/abs/2208.14228).
"""

import os
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from app.data.shares import Shards
from app.errors import UserError
from app.system.patches import expects
from app.system.random_streams import own_streams, seed_of
from app.training.buffers import Buffers
from app.training.hooks import Hooks
from app.training.step import StraightLoop
from app.training.step_patches import EPOCH_LOOP, in_hook
from app.training.tree import Node, Tree

Gradients = list[Tensor | None]


def _plus(first: Gradients, second: Gradients) -> Gradients:
    """Add the first gradients to the second, in place; return the sums. None counts as zero."""
    sums = list(second)
    added_to = []
    added = []
    for place, (gradient, other) in enumerate(zip(first, second, strict=True)):
        if other is None:
            sums[place] = gradient
        elif gradient is not None:
            added_to.append(other)
            added.append(gradient)
    if added:
        torch._foreach_add_(added_to, added)
    return sums


@expects("torch:_foreach_add_")
class ShardSums:
    """Sums over all shards: of gradients, and of the vectors that `ShardedLoop._vector` returns.

    Under DDP, a communication hook sums the gradients during the backward pass of the rank's last
    shard.

    Args:
        module: The module.
        strategy: The strategy, after it has set up the model.
        count: Number of shards.

    Attributes:
        in_buckets: Whether the model is wrapped in DDP. Then DDP's buckets hold the summed
            gradients. DDP holds this object; a reference to DDP would keep both in memory.
    """

    def __init__(self, module: LightningModule, strategy: Any, count: int) -> None:
        model = strategy.model
        self.device = strategy.root_device
        # frozen ones, too, because a callback may unfreeze them
        self.parameters = list(module.parameters())
        self.nodes: dict[Node, Gradients] = {}
        self.tree = Tree(count)
        # a CUDA stream or a thread communicates during the backward pass
        self.side: torch.cuda.Stream | None = None
        self.thread: ThreadPoolExecutor | None = None
        self.in_buckets = isinstance(model, DistributedDataParallel)
        if self.in_buckets:
            self.tree = Tree(count, strategy.global_rank, strategy.world_size, model.process_group)
            if self.device.type == "cuda":
                self.side = torch.cuda.Stream(self.device)
            if self.device.type == "cpu":
                self.thread = ThreadPoolExecutor(1)
            model.register_comm_hook(None, self._add_bucket)

    def add_shard(self, shard: int) -> None:
        """Move a shard's gradients from the parameters into the sums."""
        self.tree.add(self.nodes, (0, shard), self.pop_gradients(), _plus)

    def pop_gradients(self) -> Gradients:
        """Return the parameters' gradients, and set them to None."""
        gradients = []
        for parameter in self.parameters:
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def set_gradients(self) -> None:
        """Set the gradients to the sums over all shards, unless DDP's hook has set them."""
        if not self.in_buckets:
            sums = self.nodes[self.tree.root]
            for parameter, gradient in zip(self.parameters, sums, strict=True):
                parameter.grad = gradient
        self.nodes = {}

    def sum(self, nodes: dict[Node, Tensor]) -> Future[Tensor]:
        """Start summing vectors (n,) over all ranks' shards; return a future. Collective."""
        future: Future[Tensor] = Future(devices=[self.device] if self.side else [])
        if self.thread is not None:
            self.thread.submit(self._set_sum, future, nodes)
        elif self.side is None:
            self._set_sum(future, nodes)
        else:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.side):
                self._set_sum(future, nodes)
            for vector in nodes.values():
                # reuse the vector's memory only after the side stream has read it
                vector.record_stream(self.side)
        return future

    def _set_sum(self, future: Any, nodes: dict[Node, Tensor]) -> None:
        try:
            future.set_result(self.tree.sum(nodes))
        except Exception as error:
            future.set_exception(error)

    def _add_bucket(self, _: None, bucket: GradBucket) -> Future[Tensor]:
        """Sum a bucket over all shards. DDP calls this hook in the last shard's backward pass."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()

        def views(flat: Tensor) -> list[Tensor]:  # DDP's buckets keep each parameter's strides
            start = flat.storage_offset()
            parts = []
            for parameter in parameters:
                parts.append(flat.as_strided(parameter.size(), parameter.stride(), start))
                start += parameter.numel()
            return parts

        place_of = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        places = [place_of[id(parameter)] for parameter in parameters]
        nodes = {}
        for node, gradients in self.nodes.items():
            nodes[node] = [gradients[place] for place in places]
        self.tree.add(nodes, (0, self.tree.shards[-1]), list(views(buffer)), _plus)
        flats = {}
        for node, gradients in nodes.items():
            if node not in self.nodes:
                flats[node] = buffer  # it holds this node's sum, because `_plus` adds in place
                continue
            flats[node] = torch.zeros_like(buffer)
            for view, gradient in zip(views(flats[node]), gradients, strict=True):
                if gradient is not None:
                    view.copy_(gradient)
        return self.sum(flats)


class Logged:
    """Values that `training_step` logs for each shard; in the end, the step logs their means.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.options: dict[str, dict[str, Any]] = {}
        self.values: dict[str, Any] = {}  # logged for the current shard

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Replace `LightningModule.log`: keep a value for later; log a metric at once."""
        how = options.get("reduce_fx", "mean")
        if isinstance(value, Metric):
            LightningModule.log(self._module, name, value, *args, **options)
        elif how in ("mean", torch.mean):
            names = ("prog_bar", "logger", "on_step", "on_epoch")
            named = dict(zip(names, args, strict=False))
            self.options[name] = {**named, **options, "sync_dist": False}
            self.values[name] = value
        else:
            raise UserError(
                f"self.log({name!r}, reduce_fx={how!r}): over virtual devices, training_step logs "
                "only means: log a torchmetrics metric instead, or leave --run.virtual_devices out"
            )

    def log_step(self, means: Sequence[Tensor], samples: int) -> None:
        """Log the means over all shards."""
        for (name, options), mean in zip(self.options.items(), means, strict=True):
            LightningModule.log(self._module, name, mean, **{**options, "batch_size": samples})


def seed_of_shard(trainer: Trainer, purpose: int, step: int, shard: int) -> int:
    """Return the seed of a shard's streams; `purpose` is 4 for transforms, 5 for training."""
    return seed_of(
        int(os.environ.get("PL_GLOBAL_SEED", 0)), purpose, trainer.current_epoch, step, shard
    )


@expects(f"{EPOCH_LOOP}._should_check_val_fx")
class ShardedLoop(StraightLoop):
    """Loop over batches that computes loss and gradients on each shard of a batch in turn.

    Attributes:
        virtual_devices: Number of shards of each global batch.
        sums: Sums over shards; None before the first step.
        samples: Number of samples of the current global batch.
        live: Object whose `between_steps` is called after each step of a live run, or None.
    """

    live: Any = None
    virtual_devices: int
    sums: Any = None  # ShardSums
    samples = 0
    _model: Any  # the strategy's model, of `sums`

    def check(self, hooks: Hooks) -> None:
        """Raise a UserError if strategy, model or data cannot train on shards."""
        if self.reason:
            raise UserError(
                f"--run.virtual_devices does not work with {self.reason}: leave one of them out"
            )
        if hooks.order is None:
            loader = type(self.trainer.train_dataloader).__name__
            raise UserError(
                f"--run.virtual_devices: {loader} deals samples to each process by itself: "
                "use one DataLoader and --run.loader exact"
            )

    def on_run_start(self, data_fetcher: Any) -> None:
        """Find hooks and buffers anew."""
        super().on_run_start(data_fetcher)
        module = self.trainer.lightning_module
        strategy = self.trainer.strategy
        if self.sums is None or self._model is not strategy.model:
            self._model = strategy.model
            self.sums = ShardSums(module, strategy, self.virtual_devices)
        self._buffers = Buffers(module)
        self._device = strategy.root_device
        self._checked = False  # whether buffers and logged values of a step have been checked

    def prepare(self, batch: Any) -> Shards:
        """Move each shard to the device, and call the batch hooks with its random stream."""
        assert isinstance(batch, Shards)
        self.samples = batch.samples
        step = self.batch_progress.current.ready
        with own_streams(self._device) as seed:
            for place, shard in enumerate(batch):
                seed(seed_of_shard(self.trainer, 4, step, batch.first + place))
                batch[place] = super().prepare(shard)
        return batch

    def on_batch_start(self, batch: Any, size: int | None = None) -> None:
        """Set the batch and its number of samples for `self.log`."""
        super().on_batch_start(batch, self.samples)

    def accumulate(self) -> None:
        """Compute gradients; each accumulated batch's gradients are summed over the ranks."""
        self.compute()

    @torch.enable_grad()
    def compute(self) -> Tensor | None:
        """Compute loss and gradients over all shards, as the optimizer's closure."""
        module = self.trainer.lightning_module
        logged = Logged(module)
        self._buffers.save()
        module.log = logged.log  # type: ignore[method-assign]
        try:
            with own_streams(self._device) as seed:
                changed, outputs, earlier, sums = self._over_shards(logged, seed)
        except RuntimeError as error:
            reason, words, _ = str(error).partition("deterministic implementation")
            if not words:
                raise
            raise UserError(
                f"--run.virtual_devices: {reason}{words}, so results would differ between runs: "
                "replace this operation, or leave the flag out"
            ) from error
        finally:
            del module.log
        self.sums.set_gradients()
        for parameter, gradient in zip(self.sums.parameters, earlier, strict=True):
            if gradient is not None and parameter.grad is not None:
                gradient.add_(parameter.grad)
            if gradient is not None:
                parameter.grad = gradient
        loss = self._finish(sums.wait(), changed, logged)
        self.outputs = {**outputs, "loss": loss / self.trainer.accumulate_grad_batches}
        if not self._checked:
            for name in logged.options:
                # hide the advice to use sync_dist: the values are equal on all ranks, and
                # sync_dist would only round them
                warnings.filterwarnings(
                    "ignore", rf"It is recommended to use `self\.log\('{re.escape(name)}'"
                )
        self._checked = True
        return self.outputs["loss"]

    def _over_shards(
        self, logged: Logged, seed: Callable[[int], None]
    ) -> tuple[list[int], dict[str, Any], Gradients, Future[Tensor]]:
        """Run the forward and backward pass of each shard.

        Returns:
            Four values: indices of the buffers that `training_step` changed; outputs of the last
            shard, empty if `training_step` returns a tensor; copy of the gradients that earlier
            batches have accumulated; future of the sum of all shards' vectors (see `_vector`).
        """
        batch = self.batch
        trainer = self.trainer
        order = self.hooks.order
        changed: list[int] = []
        earlier: Gradients = []
        names: set[str] = set()
        vectors: dict[Node, Tensor] = {}
        for place, (shard, count) in enumerate(zip(batch, batch.counts, strict=True)):
            number = batch.first + place
            is_last = place == len(batch) - 1
            # DDP's communication hook runs in the last shard's backward pass
            with nullcontext() if is_last else self.hooks.block_sync():
                seed(seed_of_shard(trainer, 5, self.index, number))
                logged.values = {}
                output = self.hooks.training_step(shard, self.index)
                loss: Tensor | None = output
                outputs: dict[str, Any] = {}
                if not isinstance(output, Tensor):
                    loss, outputs = self.unpack(output, 1)
                if loss is None:
                    raise UserError(
                        "training_step returned None, to skip a shard: virtual devices cannot "
                        "skip one"
                    )
                before = changed
                changed = self._buffers.changed()
                if place == 0:
                    earlier = self._begin()
                elif before != changed or logged.values.keys() != names:
                    different = logged.values.keys() ^ names
                    for index in set(before) ^ set(changed):
                        different.add(self._buffers.names[index])
                    raise UserError(
                        f"training_step changes or logs {min(different)} on some shards only: "
                        "do it on all, or leave --run.virtual_devices out"
                    )
                names = set(logged.values)
                vector = self._vector(loss, count, changed, logged)
                self.sums.tree.add(vectors, (0, number), vector, torch.add)
                if is_last:
                    sums = self.sums.sum(vectors)
                weight = order.loss_weight(trainer, self.index, count)
                self.hooks.backward(loss * weight, self.optimizer)
            if not is_last:
                self._buffers.restore(changed)
            if not is_last or not self.sums.in_buckets:
                self.sums.add_shard(number)
        return changed, outputs, earlier, sums

    def _begin(self) -> Gradients:
        """Zero the gradients before an optimizer step; return those accumulated so far."""
        if self.index % self.trainer.accumulate_grad_batches == 0:
            self.zero_gradients()
        earlier = []
        for gradient in self.sums.pop_gradients():
            if gradient is not None:
                gradient = gradient.clone()  # it may be a view of DDP's buckets
            earlier.append(gradient)
        return earlier

    def _vector(self, loss: Tensor, count: int, changed: list[int], logged: Logged) -> Tensor:
        """Concatenate a shard's loss, buffers and logged values, times its number of samples."""
        tensors = [loss, *self._buffers.values(changed)]
        for name in logged.options:
            tensors.append(torch.as_tensor(logged.values[name], device=self._device))
        exact = torch.float32 if self._device.type == "mps" else torch.float64
        vector = torch.cat([tensor.detach().reshape(-1).to(exact) for tensor in tensors])
        if count == 0:  # an empty shard trains on stand-in samples, which the means exclude
            return torch.zeros_like(vector)
        return vector.mul_(count)

    def _finish(self, vector: Tensor, changed: list[int], logged: Logged) -> Tensor:
        """Set the buffers to their means over shards, log the values, and return the mean loss."""
        vector.div_(self.samples)
        buffers = self._buffers.values(changed)
        sizes = [buffer.numel() for buffer in buffers]
        loss, *values = vector.split([1, *sizes, *[1] * len(logged.options)])
        means = values[: len(changed)]
        if not self._checked:
            for place, buffer, mean in zip(changed, buffers, means, strict=True):
                if not buffer.is_floating_point() and (mean.view_as(buffer) != buffer).any():
                    raise UserError(
                        f"training_step sets the buffer {self._buffers.names[place]}, of "
                        f"{buffer.dtype}, to different values on the shards: make it a float, "
                        "which is averaged, or leave --run.virtual_devices out"
                    )
        self._buffers.write(changed, means)
        logged_means = [value.float()[0] for value in values[len(changed) :]]
        log_step = in_hook(self.trainer, "training_step", logged.log_step)
        log_step(logged_means, self.samples)
        return loss[0].float()

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Keep the state of a live run before a validation, or else once the step is complete."""
        if self.live is None:
            super().on_advance_end(data_fetcher)
            return
        validates = self._should_check_val_fx(data_fetcher)
        if validates and not self.restarting:
            self.live.between_steps(self.trainer, validates)
        super().on_advance_end(data_fetcher)
        if not validates:
            self.live.between_steps(self.trainer, validates)

    def teardown(self) -> None:
        """Drop the sums, because they belong to the strategy's model."""
        self.sums = None
        super().teardown()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the loop's state, with the settings that a bitwise equal resume must keep."""
        return {**super().on_save_checkpoint(), **self.kept}

    @property
    def kept(self) -> dict[str, int]:
        """Settings that affect rounding: number of shards, and number of CPU threads."""
        threads = 0
        if self.trainer.strategy.root_device.type == "cpu":
            threads = torch.get_num_threads()
        return {"virtual_devices": self.virtual_devices, "threads": threads}
