"""Properties of a strategy that decide which flags work with it."""

from collections.abc import Callable


class Traits:
    """Properties of a strategy, with the defaults for Lightning's own strategies.

    Attributes:
        single_process: Whether all devices belong to one process.
        processes_per_node: Number of processes per node, or None for one per device.
        replicas_communicate: Whether replicas can exchange values in the forward pass, as
            SyncBatchNorm must.
        needs_several_nodes: Error message for a run on one node, with another strategy to use. None
            if the strategy works on one node.
        fixed_hook: Communication hook of the strategy, or None.
        not_in_checkpoint: Description of the strategy's state that a checkpoint lacks, or None.
    """

    single_process = False
    processes_per_node: int | None = None
    replicas_communicate = True
    needs_several_nodes: str | None = None
    fixed_hook: Callable | None = None
    not_in_checkpoint: str | None = None
