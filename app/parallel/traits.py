"""Properties of a strategy that decide which flags work with it."""

from collections.abc import Callable


class Traits:
    """Properties of a strategy, with the defaults for Lightning's own strategies.

    Attributes:
        single_process: Whether all devices belong to one process.
        processes_per_node: Number of processes of a node, or None for one per device.
        replicas_communicate: Whether replicas exchange values within the forward pass, as SyncBatchNorm does.
        sends_between_devices: Whether it uses point-to-point operations, which gloo has on CPU only.
        needs_several_nodes: Why it needs several nodes, or None.
        on_one_node: The strategy to use on one node instead.
        fixed_hook: Its communication hook, or None.
        not_in_checkpoint: State that a checkpoint lacks, in words, or None.
    """

    single_process = False
    processes_per_node: int | None = None
    replicas_communicate = True
    sends_between_devices = False
    needs_several_nodes: str | None = None
    on_one_node: str | None = None
    fixed_hook: Callable | None = None
    not_in_checkpoint: str | None = None
