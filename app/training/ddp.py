"""Strategy `ddp`: one process per device."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeFloat
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from app.system.connections import form
from app.system.patches import expects


@expects("lightning.pytorch.strategies.ddp:DDPStrategy._timeout")
class DDP(DDPStrategy):
    """Lightning's DDP strategy, with four changes.

    Communication hooks work on every device. Lightning registers them only on CUDA, and drops them
    silently elsewhere. Source: strategies/ddp.py, `_register_ddp_hooks`.

    The model is wrapped on the current stream. Lightning wraps it on a new stream, where autograd's
    accumulation nodes stay, so that each backward pass waits for that stream. Source:
    https://github.com/Lightning-AI/pytorch-lightning/pull/21746.

    With gloo, DDP has a process group of its own, except under a communication hook. Lightning uses
    the default group, which the user's code shares.

    `self.log(…, sync_dist=True)` averages over the samples of all ranks. Lightning divides by the
    mean number of samples per rank, rounded down. Source: result.py, `_ResultMetric.compute`.

    At an upgrade: does `configure_ddp` still only wrap the model and register hooks?

    Args:
        process_group_backend: Communication library: `gloo` or `nccl`; by default nccl on CUDA,
            gloo on CPU.
        ddp_comm_hook: Import path of a function that replaces the all-reduce of each bucket of
            gradients, such as
            `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook`.
        ddp_comm_state: First argument of the hook.
        ddp_comm_wrapper: Wrapper of the hook, such as `default_hooks.fp16_compress_wrapper`.
        find_unused_parameters: Search on each step for parameters that the loss does not use. Costs
            time.
        static_graph: Promise that every step uses the same parameters. Does not work with gradient
            accumulation.
        gradient_as_bucket_view: Make gradients views of the communicated buckets, not copies.
        bucket_cap_mb: Size of the buckets in MiB; torch's default is 25.
        start_method: Start method of the processes: `popen` runs the command line again.

    Attributes:
        own_launcher: Launcher to use in place of Lightning's, or None.
        keeps_buffers: Whether virtual devices keep the buffers equal, in place of DDP's broadcast.
    """

    strategy_name = "ddp"
    own_launcher: Any = None
    keeps_buffers = False

    def __init__(
        self,
        process_group_backend: str | None = None,
        ddp_comm_hook: Callable | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_wrapper: Callable | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: NonNegativeFloat | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            ddp_comm_state=ddp_comm_state,
            start_method=start_method,
        )
        self.start_method = start_method
        self.hook = ddp_comm_hook
        self.hook_state = ddp_comm_state
        self.hook_wrapper = ddp_comm_wrapper
        self.ddp_options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        if self.strategy_name == "ddp" and start_method != "popen":
            self.strategy_name = f"ddp_{start_method}"

    @property
    def launcher(self) -> Any:
        """The launcher of the strategy's processes."""
        return self.own_launcher or super().launcher

    def configure_ddp(self) -> None:
        """Wrap the model, and register the communication hook."""
        group = None
        # a separate group, because in a shared group, gloo may pair DDP's collective call on one
        # rank with the user's collective call on another rank, and abort
        if distributed.is_initialized() and distributed.get_backend() == "gloo":
            level = distributed.get_debug_level()
            # at level DETAIL, torch would wrap the new group, and its DDP logger would crash on the
            # wrapper
            distributed.set_debug_level(distributed.DebugLevel.OFF)
            try:
                group = form(lambda: distributed.new_group(backend="gloo", timeout=self._timeout))
            finally:
                distributed.set_debug_level(level)
        devices = self.determine_ddp_device_ids()
        model: Any = self.model
        self._trainable = trainable(model)
        self.model = DistributedDataParallel(
            model, device_ids=devices, process_group=group, **self.ddp_options
        )
        if self.keeps_buffers:
            self.model.broadcast_buffers = False
        hook = self.hook
        if hook and self.hook_wrapper:
            hook = self.hook_wrapper(hook)
        if hook:
            self.model.register_comm_hook(self.hook_state, hook)

    def follow_frozen(self) -> None:
        """Wrap the model again if layers were frozen or unfrozen.

        DDP averages only the gradients of parameters that were trainable when it wrapped the model.
        Collective.
        """
        wrapped = self.model
        if not isinstance(wrapped, DistributedDataParallel):
            return
        if self._trainable != trainable(wrapped.module):
            self.model = wrapped.module
            self.configure_ddp()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks; compute the mean of integers in floating point."""
        is_tensor = isinstance(tensor, torch.Tensor)
        if is_tensor and reduce_op == "mean" and not tensor.is_floating_point():
            tensor = tensor.float()
        return super().reduce(tensor, group, reduce_op)


def trainable(model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
