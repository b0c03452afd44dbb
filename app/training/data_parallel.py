"""Strategy `dp`: one process that splits every batch over its devices.

Lightning removed this strategy in 2.0. As in `net = nn.DataParallel(net)`, only the forward pass
runs on the replicas. Loss, metrics and logging run once, on the main device, with the gathered
output.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import gather, parallel_apply, replicate
from torch.nn.parallel.scatter_gather import scatter_kwargs

from app.data.batches import tensors
from app.errors import UserError
from app.modules import ImageClassifier
from app.system.lightning_patches import set_device
from app.system.torch_patches import shallow_copies


class Replica(nn.Module):
    """Replica of the model on one device, with the calling thread's autocast state.

    For an `ImageClassifier` without test-time views, only the network is copied, because `forward`
    calls nothing else. Any other LightningModule is copied whole.

    The replica sets the autocast state itself, because `parallel_apply` enables autocast without
    its dtype. Otherwise, bf16 would silently become fp16.

    Attributes:
        index: Number of this replica.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module: nn.Module = module
        if (
            isinstance(module, ImageClassifier)
            and type(module).forward is ImageClassifier.forward
            and not module.views
            and module.recipe.freeze != "backbone"  # it may take features
        ):
            self.module = module.network
        self.index = 0
        self.inference = False

    def capture(self, device_type: str) -> None:
        """Save the calling thread's autocast state and inference mode."""
        self.inference = torch.is_inference_mode_enabled()
        dtype = torch.get_autocast_dtype(device_type)
        enabled = torch.is_autocast_enabled(device_type)
        self.autocast = partial(torch.autocast, device_type, dtype, enabled)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass on this replica."""
        # not inference_mode(False), which would enable gradients
        inference = torch.inference_mode() if self.inference else nullcontext()
        with inference, self.autocast():
            # call the class's `forward`, because the strategy replaced the instance's
            if isinstance(self.module, LightningModule):
                return type(self.module).forward(self.module, *args, **kwargs)
            return self.module(*args, **kwargs)


def _over_replicas(step: Callable) -> Callable:
    """Wrap a step, so that its forward pass is split over the replicas."""

    @wraps(step)
    def call(self: "DataParallelStrategy", *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        before = self._forwards
        module.__dict__["forward"] = self._forward
        try:
            result = step(self, *args, **kwargs)
        finally:
            del module.__dict__["forward"]
        if self._forwards == before:
            name = type(module).__name__
            raise UserError(
                f"dp splits {name}.forward over the devices, but its step never calls self(batch), "
                "so only one device would work: "
                "call self(...) in the step, or use --trainer.strategy ddp"
            )
        return result

    return call


class DataParallelStrategy(SingleDeviceStrategy):
    """Strategy that splits every batch over the devices of one process.

    On CUDA it works as `torch.nn.DataParallel`: each forward pass creates new replicas. On a CPU,
    `devices: N` runs N replicas in threads that share the parameters. As in `DataParallel`, only
    the running statistics of replica 0's BatchNorm persist.

    Args:
        parallel_devices: Devices; the first one holds the model and computes the loss.

    Attributes:
        replica: Module to copy to each device.
    """

    strategy_name = "dp"
    single_process = True
    replica: Any = None  # Replica, from setup on
    _forwards = 0
    # One thread for each replica, because autograd numbers the operations of each forward thread
    # separately, and orders the backward pass by these numbers. In a shared pool, a replica's
    # thread would vary between steps. Then the order of the backward pass's additions would vary,
    # too.
    _threads: Sequence[ThreadPoolExecutor] = ()

    def __init__(self, parallel_devices: list[torch.device] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parallel_devices = parallel_devices or []

    @property
    def root_device(self) -> torch.device:
        """Device that holds the model and computes the loss."""
        return self.parallel_devices[0]

    def setup(self, trainer: Any) -> None:
        """Move the model to the main device, and prepare the replicas."""
        super().setup(trainer)
        self.replica = Replica(self.lightning_module)
        if self.root_device.type != "cuda":
            self._threads = [ThreadPoolExecutor(1) for _ in self.parallel_devices]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the threads: a spawned worker may unpickle the Trainer."""
        return {**super().__getstate__(), "_threads": ()}

    def teardown(self) -> None:
        """Shut down the threads."""
        for thread in self._threads:
            thread.shutdown()
        super().teardown()

    training_step = _over_replicas(SingleDeviceStrategy.training_step)
    validation_step = _over_replicas(SingleDeviceStrategy.validation_step)
    test_step = _over_replicas(SingleDeviceStrategy.test_step)
    predict_step = _over_replicas(SingleDeviceStrategy.predict_step)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._forwards += 1
        devices = self.parallel_devices
        self.replica.capture(devices[0].type)
        if len(devices) == 1:  # one device needs no scatter
            return self.replica(*args, **kwargs)
        if devices[0].type != "cuda":
            return _forward_in_threads(self.replica, self._threads, args, kwargs)
        replica_args, replica_kwargs = scatter_kwargs(args, kwargs, devices)
        devices = devices[: len(replica_args)]
        replicas = replicate(self.replica, devices, detach=not torch.is_grad_enabled())
        for index, replica in enumerate(replicas):
            replica.index = index
            if isinstance(replica.module, LightningModule):
                set_device(replica.module, devices[index])
        return gather(parallel_apply(replicas, replica_args, replica_kwargs, devices), devices[0])


def _forward_in_threads(
    replica: Replica, threads: Sequence[ThreadPoolExecutor], args: Any, kwargs: Any
) -> Any:
    """Run `nn.DataParallel`'s forward pass on one CPU: scatter, apply in threads, gather."""
    count = len(threads)
    chunks = [len(leaf.chunk(count)) for leaf in tensors([args, kwargs]) if leaf.ndim]
    is_grad_enabled = torch.is_grad_enabled()

    def apply(index: int, copy: Replica) -> Any:
        copy.index = index
        with torch.set_grad_enabled(is_grad_enabled):
            share = apply_to_collection((args, kwargs), Tensor, _chunk, count, index)
            return copy(*share[0], **share[1])

    started = []
    for index, copy in enumerate(shallow_copies(replica, max(chunks, default=1))):
        started.append(threads[index].submit(apply, index, copy))
    wait(started)
    return _gather([future.result() for future in started])


def _chunk(values: Tensor, count: int, index: int) -> Tensor:
    """Return a replica's share of a tensor; all of a scalar."""
    if values.ndim == 0:
        return values
    return values.chunk(count)[index]


def _gather(outputs: Sequence[Any]) -> Any:
    """Gather the replicas' outputs: concatenate tensors along the batch; stack scalars.

    An output without tensors is replica 0's.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat([torch.atleast_1d(output) for output in outputs])
    if isinstance(first, Mapping):
        gathered = {key: _gather([output[key] for output in outputs]) for key in first}
        return type(first)(gathered)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        items = map(_gather, zip(*outputs, strict=True))
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
