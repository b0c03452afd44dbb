"""Patches that use torch's private names, one function per use.

At an upgrade, `tests/test_patches.py` lists missing names.
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import distributed, nn

from app.system.patches import expects

Module = TypeVar("Module", bound=nn.Module)


@expects(
    *(
        f"torch.nn:Module._{name}"
        for name in ("replicate_for_data_parallel", "parameters", "modules", "buffers")
    )
)
def shallow_copies(module: Module, count: int) -> Sequence[Module]:
    """Return copies of a module that share its parameters; only the first copy shares the module's buffers.

    Separate buffers keep threads from writing to the same running statistics.
    `torch.nn.parallel.replicate` works only on CUDA. At an upgrade: compare with the loops of
    torch/nn/parallel/replicate.py.
    """
    modules = list(module.modules())
    copies = []
    for index in range(count):
        copy_of: dict[nn.Module, nn.Module] = {
            child: child._replicate_for_data_parallel() for child in modules
        }
        for original, copy in copy_of.items():
            copy._parameters = original._parameters
            copy._modules = {
                name: child and copy_of[child] for name, child in original._modules.items()
            }
            if index > 0:
                copy._buffers.update(
                    {name: b.clone() for name, b in original._buffers.items() if b is not None}
                )
        copies.append(copy_of[module])
    return copies  # type: ignore[return-value]


def end_process_group() -> None:
    """Destroy the process group before Python exits, because gloo's threads sometimes abort an exiting process.

    Source: https://github.com/pytorch/pytorch/pull/179291. Lightning does this only for its own
    NCCL group.
    """
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@expects("torch.distributed.distributed_c10d:_abort_process_group")
def abort_process_group() -> None:
    """Abort the process group, because destroying an NCCL group would wait for the other ranks.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown. At an upgrade: is there
    a public function?
    """
    distributed.distributed_c10d._abort_process_group()
