"""Strategy `ddp`: one process per device."""

from collections.abc import Callable
from typing import Literal

from jsonargparse.typing import NonNegativeFloat

from app.system.lightning_patches import DDPWithHooks
from app.training.traits import Traits


class DDP(Traits, DDPWithHooks):
    """Lightning's DDP strategy, with communication hooks on every type of device.

    Args:
        process_group_backend: Communication library: `gloo`, `nccl` or `mpi`; by default nccl on
            CUDA, gloo on CPU.
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
    """

    strategy_name = "ddp"

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
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_wrapper=ddp_comm_wrapper,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
        )
        if self.strategy_name == "ddp" and start_method != "popen":
            self.strategy_name = f"ddp_{start_method}"
