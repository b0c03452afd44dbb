"""`ddp`: one process for each device, and `ddp_dp`: one for each node."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from app.errors import UserError, nearest
from app.parallel.data_parallel import SplitForward
from app.system.lightning_patches import DDPWithHooks, comm_hook


class DDP(DDPWithHooks):
    """Lightning's DDP strategy, whose communication hooks act on every device, and which refuses what cannot act.

    Args:
        process_group_backend: Library that communicates: `gloo`, `nccl`, `mpi`; by default nccl on CUDA, gloo on CPU.
        ddp_comm_hook: Averages each bucket of gradients in place of an all-reduce: the import path of a function, such
            as `torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook`.
        ddp_comm_state: First argument of the hook.
        ddp_comm_wrapper: Is given the hook and returns the one to use, such as `default_hooks.fp16_compress_wrapper`.
        find_unused_parameters: Look on each step for parameters that had no part in the loss. Costs time.
        static_graph: Promise that every step uses the same parameters. Not with gradient accumulation.
        gradient_as_bucket_view: Let gradients be views of the buckets that are communicated, not copies.
        bucket_cap_mb: Size of the buckets in MiB; torch's own is 25.
        start_method: How the processes are started: `popen` runs the command line again.

    Raises:
        UserError: When it is asked for what has no effect here, or cannot work.
    """

    strategy_name = "ddp"
    not_in_checkpoint: str | None = None

    def __init__(
        self,
        process_group_backend: str | None = None,
        ddp_comm_hook: Callable | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_wrapper: Callable | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_wrapper=ddp_comm_wrapper,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
        )
        self.least = {"bucket_cap_mb": (bucket_cap_mb or 0, 0)}
        self.static_graph = static_graph
        if self.strategy_name == "ddp" and start_method != "popen":
            self.strategy_name = f"ddp_{start_method}"

    def _configure_launcher(self) -> None:
        """Refuse what cannot work: here Lightning has set all that was asked for."""
        for name, (value, least) in self.least.items():  # not in __init__: jsonargparse would bury what is said there
            if value < least:
                raise UserError(f"--trainer.strategy.{name} {value}: give {least} or more")
        self._check_backend()
        self._check_hook()
        super()._configure_launcher()

    def _check_backend(self) -> None:
        backend = self.process_group_backend
        if backend is None:
            return
        flag, device = f"--trainer.strategy.process_group_backend {backend}", self.root_device.type
        serves = {name: devices for name, devices in dist.Backend.backend_capability.items() if name != "fake"}
        if backend not in serves:
            raise UserError(f"{flag}: unknown{nearest(backend, serves)}")
        usable = [name for name in serves if device in serves[name] and dist.is_backend_available(name)]
        if backend not in usable:
            why = f"does not serve {device}" if device not in serves[backend] else "this torch was built without it"
            raise UserError(f"{flag}: {why}: use {' or '.join(usable)}")

    def _check_hook(self) -> None:
        hook, state, wrapper = comm_hook(self)
        if hook is None:
            for name, value in (("ddp_comm_state", state), ("ddp_comm_wrapper", wrapper)):
                if value is not None:
                    raise UserError(f"--trainer.strategy.{name} has no effect without a hook: give ddp_comm_hook, too")
            return
        if "bucket" not in inspect.signature(hook).parameters:
            raise UserError(
                f"--trainer.strategy.ddp_comm_hook {hook.__qualname__}: not a hook: give a function of state and bucket"
            )
        if self.num_nodes * self.num_processes == 1:
            raise UserError(
                f"--trainer.strategy {self.strategy_name}: {hook.__qualname__} changes how processes communicate, but "
                "this run is one process: use --trainer.strategy ddp without a hook, or give more --trainer.devices"
            )
        bf16 = hook is default_hooks.bf16_compress_hook or wrapper is default_hooks.bf16_compress_wrapper
        if bf16 and not (dist.is_nccl_available() or dist.is_xccl_available()):  # torch's condition, on CPU, too
            raise UserError(
                f"--trainer.strategy {self.strategy_name}: torch refuses to send bfloat16 where it was built without "
                "NCCL: use --trainer.strategy ddp_fp16"
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume, and say what of this way of running cannot be."""
        super().load_optimizer_state_dict(checkpoint)
        if self.not_in_checkpoint:
            rank_zero_warn(f"{self.strategy_name}: the checkpoint does not hold {self.not_in_checkpoint}")

    def teardown(self) -> None:
        """Unwrap the model before Lightning does, which would advertise static_graph: it gains nothing here."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()


class Hybrid(SplitForward, DDP):
    """One process for each node, whose devices share its part of a batch as under `dp`; `ddp` between the nodes.

    As under `dp`, only the running statistics of replica 0's BatchNorm persist.
    """

    strategy_name = "ddp_dp"
    processes_per_node = 1

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return self.processes_per_node

    def _configure_launcher(self) -> None:
        """Refuse what cannot work: here Lightning has set all that was asked for."""
        if self.num_nodes == 1:
            raise UserError(
                "--trainer.strategy ddp_dp is for several nodes: use --trainer.strategy dp, or give more "
                "--trainer.num_nodes"
            )
        self.refuse_sync_batchnorm()
        super()._configure_launcher()
