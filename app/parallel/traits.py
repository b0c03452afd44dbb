"""Properties of a strategy that decide which flags work with it."""

from collections.abc import Callable


class Traits:
    """Properties of a strategy, with the defaults for Lightning's own strategies.

    Attributes:
        single_process: Whether all devices belong to one process.
        processes_per_node: Number of processes per node, or None for one per device.
        replicas_communicate: Whether replicas can exchange values in the forward pass, as SyncBatchNorm does.
        sends_between_devices: Whether the strategy uses point-to-point operations, which gloo has only on CPU.
        needs_several_nodes: Reason why the strategy needs several nodes, or None.
        on_one_node: Name of the strategy to use on one node instead, or None.
        fixed_hook: Communication hook of the strategy, or None.
        not_in_checkpoint: Description of state that a checkpoint lacks, or None.
    """

    single_process = False
    processes_per_node: int | None = None
    replicas_communicate = True
    sends_between_devices = False
    needs_several_nodes: str | None = None
    on_one_node: str | None = None
    fixed_hook: Callable | None = None
    not_in_checkpoint: str | None = None
