"""Patches that use torch's private names, one function per use.

At an upgrade, `tests/test_patches.py` lists missing names.
"""

from typing import Any

from torch import distributed, nn

from app.system.patches import expects


@expects(
    "torch.nn:Module._replicate_for_data_parallel",
    "torch.nn:Module._parameters",
    "torch.nn:Module._modules",
    "torch.nn:Module._buffers",
)
def shallow_copies(module: nn.Module, count: int) -> list[Any]:
    """Return copies of a module that share its parameters; the first copy also shares its buffers.

    Separate buffers keep threads from writing to the same running statistics.
    `torch.nn.parallel.replicate` works only on CUDA. At an upgrade: compare with the loops of
    torch/nn/parallel/replicate.py.
    """
    modules = list(module.modules())
    copies = []
    for index in range(count):
        copy_of = {child: child._replicate_for_data_parallel() for child in modules}
        for original, copy in copy_of.items():
            copy._parameters = original._parameters
            for name, child in original._modules.items():
                copy._modules[name] = child and copy_of[child]
            if index > 0:
                for name, buffer in original._buffers.items():
                    if buffer is not None:
                        copy._buffers[name] = buffer.clone()
        copies.append(copy_of[module])
    return copies


@expects("torch.distributed.distributed_c10d:_world")
def end_process_group() -> None:
    """Destroy the process group, because gloo's threads sometimes abort an exiting process.

    Source: https://github.com/pytorch/pytorch/pull/179291. Lightning does this only for its own
    NCCL group. Count groups anew, also after a group could not be formed: ranks find each other by
    this number.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    distributed.distributed_c10d._world.group_count = 0


@expects("torch.distributed.distributed_c10d:_abort_process_group")
def abort_process_group() -> None:
    """Abort the process group, because destroying an NCCL group would wait for the other ranks.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown. At an upgrade: is there
    a public function?
    """
    distributed.distributed_c10d._abort_process_group()
