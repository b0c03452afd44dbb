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
from itertools import accumulate
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from app.data.global_order import order_of
from app.data.shares import Shards
from app.errors import UserError
from app.system.patches import expects
from app.system.random_streams import own_streams, seed_of
from app.training.buffers import Buffers
from app.training.step import Step, StraightLoop, backward_state, training_state
from app.training.tree import Node, Tree

Gradients = list[Tensor | None]


def _plus(first: Gradients, second: Gradients) -> Gradients:
    """Add the first list of gradients to the second, in place, and return the sums; None counts as zero."""
    pairs = [
        (one, other)
        for one, other in zip(first, second, strict=True)
        if one is not None and other is not None
    ]
    if pairs:
        torch._foreach_add_([other for _, other in pairs], [one for one, _ in pairs])
    return [one if other is None else other for one, other in zip(first, second, strict=True)]


@expects("torch:_foreach_add_", "torch:_foreach_copy_")
class ShardSums:
    """Sums over all shards: of gradients, and of the vectors that `ShardedStep._vector` returns.

    Under DDP, a communication hook sums the gradients during the backward pass of the rank's last
    shard.

    Args:
        module: The module.
        strategy: The strategy, after it has set up the model.
        count: Number of shards.

    Attributes:
        in_buckets: Whether the model is wrapped in DDP. Then DDP's buckets hold the summed
            gradients.
    """

    def __init__(self, module: LightningModule, strategy: Any, count: int) -> None:
        model = strategy.model
        self.in_buckets = ddp = isinstance(model, DistributedDataParallel)
        group = model.process_group if ddp else None
        self.tree = Tree(
            count, strategy.global_rank if ddp else 0, strategy.world_size if ddp else 1, group
        )
        self.parameters = [
            *module.parameters()
        ]  # frozen ones, too, because a callback may unfreeze them
        self.place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self.nodes: dict[Node, Gradients] = {}
        self.device = strategy.root_device
        # a thread (CPU) or a CUDA stream runs the communication during the backward pass
        self.thread = ThreadPoolExecutor(1) if ddp and self.device.type == "cpu" else None
        self.side = torch.cuda.Stream(self.device) if ddp and self.device.type == "cuda" else None
        if ddp:
            model.register_comm_hook(None, self._add_bucket)

    def add_shard(self, shard: int) -> None:
        """Move a shard's gradients from the parameters into the sums."""
        self.tree.add(self.nodes, (0, shard), self.pop_gradients(), _plus)

    def pop_gradients(self) -> Gradients:
        """Return the parameters' gradients, and set them to None."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def set_gradients(self) -> None:
        """Set the parameters' gradients to the sum over all shards, unless DDP's communication hook has set them."""
        if not self.in_buckets:
            for parameter, gradient in zip(
                self.parameters, self.nodes[self.tree.root], strict=True
            ):
                parameter.grad = gradient
        self.nodes = {}

    def sum(self, nodes: dict[Node, Tensor]) -> Future[Tensor]:
        """Start summing vectors (n,) over the shards of all ranks, and return the sum's future. Collective."""
        future: Future[Tensor] = Future(devices=[self.device] if self.side else [])

        def work() -> None:
            try:
                future.set_result(self.tree.sum(nodes))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation expects a result

        if self.thread:
            self.thread.submit(work)
        elif self.side:
            self.side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.side):
                work()
            for vector in nodes.values():
                vector.record_stream(
                    self.side
                )  # reuse the vector's memory only after the side stream has read it
        else:
            work()
        return future

    def _add_bucket(self, _: None, bucket: GradBucket) -> Future[Tensor]:
        """Sum a bucket over all shards. DDP calls this hook when the bucket holds the last shard's gradients."""
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        places = [self.place[id(parameter)] for parameter in parameters]
        starts = list(accumulate((parameter.numel() for parameter in parameters), initial=0))

        def views(flat: Tensor) -> list[Tensor]:  # DDP's buckets keep each parameter's strides
            return [
                flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + start)
                for parameter, start in zip(parameters, starts, strict=False)
            ]

        nodes = {
            node: [gradients[place] for place in places] for node, gradients in self.nodes.items()
        }
        self.tree.add(nodes, (0, self.tree.shards[-1]), [*views(buffer)], _plus)
        flats: dict[Node, Tensor] = {}
        for node, gradients in nodes.items():
            flats[node] = (
                buffer  # the buffer already holds this node's sum, because `_plus` adds in place
            )
            if node in self.nodes:
                flats[node] = torch.zeros_like(buffer)
                for view, gradient in zip(views(flats[node]), gradients, strict=True):
                    if gradient is not None:
                        view.copy_(gradient)
        return self.sum(flats)


class Logged:
    """Values that `training_step` logs for each shard; after the last shard, the step logs their means.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.options: dict[str, dict[str, Any]] = {}
        self.values: dict[str, Any] = {}  # logged for the current shard

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Replace `LightningModule.log` during a shard: keep a value for later; log a torchmetrics metric at once."""
        how = options.get("reduce_fx", "mean")
        if isinstance(value, Metric):
            LightningModule.log(self._module, name, value, *args, **options)
        elif how in ("mean", torch.mean):
            names = ("prog_bar", "logger", "on_step", "on_epoch")
            self.options[name] = {
                **dict(zip(names, args, strict=False)),
                **options,
                "sync_dist": False,
            }
            self.values[name] = value
        else:
            raise UserError(
                f"self.log({name!r}, reduce_fx={how!r}): over virtual devices, training_step logs only "
                "means: log a torchmetrics metric instead, or leave --run.virtual_devices out"
            )

    def log_step(self, means: Sequence[Tensor], samples: int) -> None:
        """Log the means over all shards."""
        for (name, options), mean in zip(self.options.items(), means, strict=True):
            LightningModule.log(self._module, name, mean, **{**options, "batch_size": samples})


def seed_of_shard(trainer: Trainer, purpose: int, step: int, shard: int) -> int:
    """Return the seed of a shard's random streams; `purpose` is 4 for its transforms, 5 for its forward pass."""
    return seed_of(
        int(os.environ.get("PL_GLOBAL_SEED", 0)), purpose, trainer.current_epoch, step, shard
    )


class ShardedStep(Step):
    """Training step that runs on each shard of a batch in turn.

    Args:
        loop: The loop.
    """

    loop: "ShardedLoop"

    def __init__(self, loop: "ShardedLoop") -> None:
        super().__init__(loop)
        if loop.sums is None:
            loop.sums = ShardSums(self.module, self.strategy, loop.virtual_devices)
        self._sums = loop.sums
        self._buffers = Buffers(self.module)
        self._device = self.strategy.root_device
        self._alone, self.without_sync = (
            self.without_sync,
            nullcontext,
        )  # each batch sums over the ranks
        self._checked = False

    def _look_up_batch(self) -> None:
        super()._look_up_batch()
        self._prepare_shard = self.preparation
        self.preparation = [self._prepare]

    def _look_up_training(self) -> None:
        super()._look_up_training()
        self._log_step = self._part("training_step", lambda logged, *args: logged.log_step(*args))

    def _prepare(self, batch: Any) -> Shards:
        assert isinstance(batch, Shards)
        self.loop.samples = batch.samples
        step = self.loop.batch_progress.current.ready
        with own_streams(self._device) as seed:
            for place, shard in enumerate(batch):
                seed(seed_of_shard(self.trainer, 4, step, batch.first + place))
                for prepare in self._prepare_shard:
                    shard = prepare(shard)
                batch[place] = shard
        return batch

    @torch.enable_grad()
    def compute(self) -> Tensor | None:
        """Compute loss and gradients over all shards, as the optimizer's closure."""
        batch: Any = self.batch
        logged = Logged(self.module)
        self._buffers.save()
        self.module.log = logged.log
        try:
            with own_streams(self._device) as seed:
                changed, outputs, earlier, sums = self._over_shards(batch, logged, seed)
        except RuntimeError as error:
            reason, words, _ = str(error).partition("deterministic implementation")
            if not words:
                raise
            raise UserError(
                f"--run.virtual_devices: {reason}{words}, so results would differ between runs: replace "
                "this operation, or leave the flag out"
            ) from error
        finally:
            del self.module.log
        self._sums.set_gradients()
        for parameter, gradient in zip(self._sums.parameters, earlier, strict=True):
            if gradient is not None:
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )
        loss = self._finish(sums.wait(), batch.samples, changed, logged)
        self.outputs = {**outputs, "loss": loss / self.trainer.accumulate_grad_batches}
        for name in () if self._checked else logged.options:
            # hide the advice to use sync_dist: the values are equal on all ranks, and sync_dist
            # would only round them
            warnings.filterwarnings(
                "ignore", rf"It is recommended to use `self\.log\('{re.escape(name)}'"
            )
        self._checked = True
        return self.outputs["loss"]

    def _over_shards(
        self, batch: Shards, logged: Logged, seed: Callable[[int], None]
    ) -> tuple[list[int], dict[str, Any], Gradients, Future[Tensor]]:
        """Run the forward and backward pass of each shard.

        Returns:
            Four values: indices of the buffers that `training_step` changed; outputs of the last
            shard, empty if `training_step` returns a tensor; copy of the gradients that earlier
            batches have accumulated; future of the sum of all shards' vectors (see `_vector`).
        """
        accumulated = self.trainer.accumulate_grad_batches
        samples = batch.samples
        if accumulated > 1:
            order = order_of(self.trainer.train_dataloader)
            assert order is not None
            samples = order.window_count(self.index, *self._window)
        changed: list[int] = []
        earlier: Gradients = []
        names: set[str] = set()
        vectors: dict[Node, Tensor] = {}
        for place, (shard, count) in enumerate(zip(batch, batch.counts, strict=True)):
            number = batch.first + place
            last = place == len(batch) - 1
            with nullcontext() if last else self._alone():
                seed(seed_of_shard(self.trainer, 5, self.index, number))
                logged.values = {}
                if training_state(self) != self._training_state:
                    self._look_up_training()
                output = self.training_step(shard, self.index)
                loss, outputs = (
                    (output, {}) if isinstance(output, Tensor) else self._unpack(output, 1)
                )
                if loss is None:
                    raise UserError(
                        "training_step returned None, to skip a shard: virtual devices cannot skip one"
                    )
                before = changed
                changed = self._buffers.changed()
                if place == 0:
                    earlier = self._begin(accumulated)
                elif before != changed or logged.values.keys() != names:
                    self._refuse(set(before) ^ set(changed), logged.values.keys() ^ names)
                names = set(logged.values)
                vector = self._vector(loss, count, changed, logged)
                self._sums.tree.add(vectors, (0, number), vector, torch.add)
                if last:
                    sums = self._sums.sum(vectors)
                if backward_state(self) != self._backward_state:
                    self._look_up_backward()
                self.backward(loss * (count / samples))
            if not last:
                self._buffers.restore(changed)
            if not last or not self._sums.in_buckets:
                self._sums.add_shard(number)
        return changed, outputs, earlier, sums

    def _begin(self, accumulated: int) -> Gradients:
        """Zero the gradients before the first accumulated batch; return a copy of the gradients accumulated so far."""
        if self.index % accumulated == 0:
            self._zero()
        earlier = (
            self._sums.pop_gradients()
        )  # may be views of DDP's buckets, so they are cloned below
        return [gradient if gradient is None else gradient.clone() for gradient in earlier]

    def _refuse(self, buffers: set[int], names: set[str]) -> None:
        """Raise a UserError, because only some shards change a buffer or log a value.

        Args:
            buffers: Indices of the buffers.
            names: Names of the logged values.
        """
        what = (
            f"changes the buffer {self._buffers.name(min(buffers))}"
            if buffers
            else f"logs {min(names)!r}"
        )
        raise UserError(
            f"training_step {what} on some shards only: do it on all, or leave --run.virtual_devices out"
        )

    def _vector(self, loss: Tensor, count: int, changed: list[int], logged: Logged) -> Tensor:
        """Concatenate a shard's loss, changed buffers and logged values, and multiply them by its number of samples."""
        numbers = [
            torch.as_tensor(logged.values[name], device=self._device).detach()
            for name in logged.options
        ]
        tensors = [loss.detach(), *self._buffers.values(changed), *numbers]
        sizes = [tensor.numel() for tensor in tensors]
        exact = torch.float32 if self._device.type == "mps" else torch.float64
        vector = torch.zeros(sum(sizes), dtype=exact, device=self._device)
        if count:  # an empty shard trains on stand-in samples, which the means exclude
            torch._foreach_copy_(vector.split(sizes), [tensor.reshape(-1) for tensor in tensors])
        return vector.mul_(count)

    def _finish(self, vector: Tensor, samples: int, changed: list[int], logged: Logged) -> Tensor:
        """Set the buffers to their means over all shards, log the values, and return the mean loss."""
        vector.div_(samples)
        buffers = self._buffers.values(changed)
        sizes = [1, *(buffer.numel() for buffer in buffers), *[1] * len(logged.options)]
        loss, *values = vector.split(sizes)
        means = values[: len(changed)]
        if not self._checked:
            for place, buffer, mean in zip(changed, buffers, means, strict=True):
                if not buffer.is_floating_point() and (mean.view_as(buffer) != buffer).any():
                    raise UserError(
                        f"training_step sets the buffer {self._buffers.name(place)}, of {buffer.dtype}, to "
                        "different values on the shards: make it a float, which is averaged, or leave "
                        "--run.virtual_devices out"
                    )
        self._buffers.write(changed, means)
        self._log_step(logged, [value.float()[0] for value in values[len(changed) :]], samples)
        return loss[0].float()


class ShardedLoop(StraightLoop):
    """Loop over the batches of an epoch, with a step over virtual devices.

    Attributes:
        virtual_devices: Number of shards of each global batch.
        sums: Sums over shards; None before the first step.
        samples: Number of samples of the current global batch.
    """

    virtual_devices: int
    sums: ShardSums | None = None
    samples = 0

    def make_step(self) -> Step:
        """Look up the hooks, and return the step.

        Raises:
            UserError: When model, strategy or data cannot train on shards.
        """
        if self.reason:
            raise UserError(
                f"--run.virtual_devices does not work with {self.reason}: leave one of them out"
            )
        loader = self.trainer.train_dataloader
        if order_of(loader) is None:
            raise UserError(
                f"--run.virtual_devices: {type(loader).__name__} deals samples to each process by itself: "
                "add --run.global_order true"
            )
        return ShardedStep(self)

    def on_batch_start(self, batch: Any, size: int | None = None) -> None:
        """Set the batch and its number of samples for `self.log`."""
        super().on_batch_start(batch, self.samples)

    def teardown(self) -> None:
        """Drop the sums, because they belong to the strategy's model."""
        self.sums = None
        super().teardown()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the loop's state, with the settings that a bitwise equal resume must keep."""
        return {**super().on_save_checkpoint(), **self.kept}

    @property
    def kept(self) -> dict[str, int]:
        """Settings that affect rounding: number of shards, and number of threads that share a CPU kernel's sums."""
        threads = torch.get_num_threads() if self.trainer.strategy.root_device.type == "cpu" else 0
        return {"virtual_devices": self.virtual_devices, "threads": threads}
